"""Reproductions that need no server: what readers of other machines' bytes cost, and what they keep."""

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
"""What a read of a socket brings."""
COMMIT = "0" * 40


def seconds_of(work: Callable[[], object]) -> float:
    began_s = process_time()
    work()
    return process_time() - began_s


def over(what: str, value: float, limit: float, unit: str = "s") -> str:
    """What is still shown, or nothing."""
    return f"{what}: {value:.2f} {unit}, expected at most {limit:g}" if value > limit else ""


def fed(data: bytes) -> Callable[[], None]:
    def feed() -> None:
        stream = OpenAIStream((1, 2, 3), 49152, None, 1500)
        with suppress(MessageError):
            for at in range(0, len(data), CHUNK):
                stream.feed(data[at : at + CHUNK])

    return feed


def choices_of_a_member(_: Path) -> str:
    """A1 a line of 80,000 choices took 6 s."""
    line = b'data: {"choices":[' + b",".join([b'{"token_ids":[1]}'] * 80_000) + b"]}\n\n"
    return over("80,000 choices", seconds_of(fed(line)), 0.6)


def line_of_a_member(_: Path) -> str:
    """A1 a line of 60 MB without an end took 41 s."""
    return over("60 MB", seconds_of(fed(b"x" * (60 * MIB))), 1.0)


def pushed(form: AnswerFormat, count: int) -> Callable[[], None]:
    def push() -> None:
        reader = AnswerReader(form, str)
        for _ in range(count):
            reader.push(BLANKS)
        reader.finish()

    return push


def blanks_with_tools(_: Path) -> str:
    """A5 8,000 tokens of blanks took 14 s with tools."""
    return over("8,000 tokens", seconds_of(pushed(AnswerFormat(tools=HERMES), 8_000)), 2.0)


def blanks_before_a_thought(_: Path) -> str:
    """A5 4,000 tokens of blanks took 14 s before a thought."""
    form = AnswerFormat(reasoning=ReasoningFormat("<think>", "</think>"))
    return over("4,000 tokens", seconds_of(pushed(form, 4_000)), 2.0)


def reader_of(num_blocks: int) -> EventReader:
    index = BlockIndex(8)
    index.join(MEMBER)
    return EventReader(index, MEMBER, MODEL, 1, num_blocks, has_snapshots=False)


def frames(number: int, *told: Any) -> list[bytes]:
    return [b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([1.0, list(told), 0])]


def grown_mib(work: Callable[[], object]) -> float:
    """Of this process, while the work's result is still there."""
    gc.collect()
    before = resident_bytes()
    kept = work()
    grown = (resident_bytes() - before) / MIB
    del kept
    return grown


def endless_blocks(_: Path) -> str:
    """A6 2,000,000 names of blocks that no member has took 274 MB."""
    reader = reader_of(1_000)

    def hear() -> EventReader:
        for number in range(100):
            hashes = list(range(20_000 * number, 20_000 * (number + 1)))
            stored = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None}
            with suppress(MessageError):
                reader.receive_batch(frames(number, {**stored, "token_ids": hashes, "block_size": 1}))
                while reader.has_work:
                    reader.work()
        return reader

    return over("grown by", grown_mib(hear), 32, "MiB") or over("names", reader.num_blocks, 2_000, "")


def batches_ahead(_: Path) -> str:
    """A6 200 batches of 1 MB ahead of their turn took 190 MB."""

    def hear() -> EventReader:
        reader = reader_of(1_000)
        for number in range(1, 201):
            reader.receive_batch([b"", number.to_bytes(8, "big"), bytes(MIB)])
        return reader

    return over("grown by", grown_mib(hear), 40, "MiB")


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
            found = find_local(HubName("a/b"), 1 << 30)
        except TypeError as error:
            return f"TypeError: {error}"
    return "" if found is None else "found as a whole model"


def endless_event(_: Path) -> str:
    """B lines of 8 MB without a blank one were all kept by `quire top`."""
    reader, num_lines = SseReader(MAX_EVENT_BYTES), 0
    with suppress(MessageError):
        while num_lines < 20:
            num_lines += 1
            reader.feed(b"data: " + b"x" * (8 * MIB - 16) + b"\n")
    return over("lines read", num_lines, 2, "")


def members_figures(_: Path) -> str:
    """B 16 MB of `/metrics` of a member were read each second."""

    async def asked() -> str:
        num_sent = 0

        async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_sent
            await reader.readuntil(b"\r\n\r\n")
            with suppress(ConnectionError, asyncio.CancelledError):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (16 * MIB))
                for _ in range(16 * MIB // CHUNK):
                    writer.write(b"#" * CHUNK)
                    await writer.drain()
                    num_sent += CHUNK
            writer.close()

        server = await asyncio.start_server(answered, "127.0.0.1", 0)
        try:
            await fetch(ServerAddress(*server.sockets[0].getsockname()), "GET", "/metrics", timeout_s=60.0)
        except MessageError:
            return ""
        finally:
            server.close()
        return f"{num_sent / MIB:.0f} MiB were taken"

    return asyncio.run(asked())


def advice_of_no_template(_: Path) -> str:
    """H11 a model without a chat template sent people to an option that is not there."""
    try:
        replace(talker().text, template=None).chat([{"role": "user", "content": "hello"}])
    except TemplateError as error:
        return str(error) if "template file" in str(error) else ""
    return "it was answered without a template"


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
