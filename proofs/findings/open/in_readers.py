"""Reproductions that need no server: the time and memory that parsers of bytes from other machines take."""

import asyncio
import gc
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

import msgspec

from quire.backends.memory_plan import resident_bytes
from quire.checkpoints.hub import files as hub_files
from quire.checkpoints.hub.files import HubName, find_local
from quire.cli.watch.watch_source import MAX_EVENT_BYTES
from quire.errors import MessageError, TemplateError
from quire.fleet.kv_events.reader import EventReader
from quire.fleet.openai.stream import OpenAIStream
from quire.fleet.routing.block_index import BlockIndex
from quire.http_client import ServerAddress, SseReader, fetch
from quire.text.parsers.reader import AnswerFormat, AnswerReader
from quire.text.parsers.tool_format import HERMES, ReasoningFormat
from tests.support.fleet.event_members import MEMBER, MODEL
from tests.support.servers.talkers import talker

MIB = 1 << 20
BLANKS = " " * 64
"""One token of SmolLM2."""
CHUNK = 64 << 10
"""Bytes that one read of a socket returns, at most."""
COMMIT = "0" * 40


def seconds_of(work: Callable[[], object]) -> float:
    start_s = process_time()
    work()
    return process_time() - start_s


def excess(name: str, value: float, limit: float, unit: str = "s") -> str:
    """A message if the value is above the limit; else empty."""
    return f"{name}: {value:.2f} {unit}, expected at most {limit:g}" if value > limit else ""


def feed_stream(data: bytes) -> Callable[[], None]:
    def feed() -> None:
        stream = OpenAIStream((1, 2, 3), 49152, None, 1500)
        with suppress(MessageError):
            for start in range(0, len(data), CHUNK):
                stream.feed(data[start : start + CHUNK])

    return feed


def choices_of_a_member(_: Path) -> str:
    """A1 a line of 80,000 choices took 6 s."""
    line = b'data: {"choices":[' + b",".join([b'{"token_ids":[1]}'] * 80_000) + b"]}\n\n"
    return excess("80,000 choices", seconds_of(feed_stream(line)), 0.6)


def line_of_a_member(_: Path) -> str:
    """A1 a line of 60 MB without an end took 41 s."""
    return excess("60 MB", seconds_of(feed_stream(b"x" * (60 * MIB))), 1.0)


def push_blanks(fmt: AnswerFormat, count: int) -> Callable[[], None]:
    def push() -> None:
        reader = AnswerReader(fmt, str)
        for _ in range(count):
            reader.push(BLANKS)
        reader.finish()

    return push


def blanks_with_tools(_: Path) -> str:
    """A5 8,000 tokens of blanks took 14 s with tools."""
    return excess("8,000 tokens", seconds_of(push_blanks(AnswerFormat(tools=HERMES), 8_000)), 2.0)


def blanks_before_a_thought(_: Path) -> str:
    """A5 4,000 tokens of blanks took 14 s before a thought."""
    fmt = AnswerFormat(reasoning=ReasoningFormat("<think>", "</think>"))
    return excess("4,000 tokens", seconds_of(push_blanks(fmt, 4_000)), 2.0)


def reader_of(num_blocks: int) -> EventReader:
    index = BlockIndex(8)
    index.join(MEMBER)
    return EventReader(index, MEMBER, MODEL, 1, num_blocks, has_snapshots=False)


def frames(number: int, *events: Any) -> list[bytes]:
    return [b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([1.0, list(events), 0])]


def growth_mib(work: Callable[[], object]) -> float:
    """By how much this process grows, measured while the work's result still exists."""
    gc.collect()
    before = resident_bytes()
    result = work()
    growth = (resident_bytes() - before) / MIB
    del result
    return growth


def endless_blocks(_: Path) -> str:
    """A6 2,000,000 names of blocks that no member has took 274 MB."""
    reader = reader_of(1_000)

    def receive() -> EventReader:
        for number in range(100):
            hashes = list(range(20_000 * number, 20_000 * (number + 1)))
            event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None}
            with suppress(MessageError):
                reader.receive_batch(frames(number, {**event, "token_ids": hashes, "block_size": 1}))
                while reader.has_work:
                    reader.work()
        return reader

    return excess("growth", growth_mib(receive), 32, "MiB") or excess("blocks", reader.num_blocks, 2_000, "")


def batches_ahead(_: Path) -> str:
    """A6 200 batches of 1 MB ahead of their turn took 190 MB."""

    def receive() -> EventReader:
        reader = reader_of(1_000)
        for number in range(1, 201):
            reader.receive_batch([b"", number.to_bytes(8, "big"), bytes(MIB)])
        return reader

    return excess("growth", growth_mib(receive), 40, "MiB")


def strange_index(folder: Path) -> str:
    """A10 an index of lists in a hub cache was a TypeError."""
    model = folder / "models--a--b"
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": ["x"]}}))
    with patch.object(hub_files, "hub_cache", lambda: folder):
        try:
            model_files = find_local(HubName("a/b"), 1 << 30)
        except TypeError as error:
            return f"TypeError: {error}"
    return "" if model_files is None else "accepted as a complete model"


def endless_event(_: Path) -> str:
    """B lines of 8 MB without a blank one were all kept by `quire top`."""
    reader, num_lines = SseReader(MAX_EVENT_BYTES), 0
    with suppress(MessageError):
        while num_lines < 20:
            num_lines += 1
            reader.feed(b"data: " + b"x" * (8 * MIB - 16) + b"\n")
    return excess("lines read", num_lines, 2, "")


def members_figures(_: Path) -> str:
    """B 16 MB of `/metrics` of a member were read each second."""

    async def request_metrics() -> str:
        num_sent = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_sent
            await reader.readuntil(b"\r\n\r\n")
            with suppress(ConnectionError, asyncio.CancelledError):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (16 * MIB))
                for _ in range(16 * MIB // CHUNK):
                    writer.write(b"#" * CHUNK)
                    await writer.drain()
                    num_sent += CHUNK
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        try:
            await fetch(ServerAddress(*server.sockets[0].getsockname()), "GET", "/metrics", timeout_s=60.0)
        except MessageError:
            return ""
        finally:
            server.close()
        return f"{num_sent / MIB:.0f} MiB were read"

    return asyncio.run(request_metrics())


def advice_of_no_template(_: Path) -> str:
    """H11 a model without a chat template sent people to an option that is not there."""
    try:
        replace(talker().text, template=None).chat([{"role": "user", "content": "hello"}])
    except TemplateError as error:
        return str(error) if "template file" in str(error) else ""
    return "a chat was answered without a template"


ITEMS = (
    choices_of_a_member,
    line_of_a_member,
    blanks_with_tools,
    blanks_before_a_thought,
    endless_blocks,
    batches_ahead,
    strange_index,
    endless_event,
    members_figures,
    advice_of_no_template,
)
