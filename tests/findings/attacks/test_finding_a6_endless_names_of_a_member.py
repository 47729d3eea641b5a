"""A6: a member that lies about its cache filled the gateway's memory: nothing bounded what it said that it holds."""

import asyncio
import logging
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from quire.errors import MessageError
from quire.fleet.kv_events.batches import MAX_BATCH_BYTES, MAX_EVENTS, open_batch
from quire.fleet.kv_events.reader import MAX_HELD_BYTES, MAX_NAMES, SLICE_BLOCKS, EventReader
from quire.fleet.routing.block_index import BlockIndex
from tests.support.errors import raises_code
from tests.support.fleet.event_members import MEMBER, MODEL
from tests.support.servers.openai_server import BLOCK_SIZE, openai_server
from tests.unit.fleet.openai.test_link import fleet_of, until


def reader_of(num_blocks: int | None) -> tuple[BlockIndex, EventReader]:
    index = BlockIndex(8)
    index.join(MEMBER)
    return index, EventReader(index, MEMBER, MODEL, 1, num_blocks, has_snapshots=False)


def stored(first: int, num_blocks: int, block_size: int = 1) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(range(first, first + num_blocks)),
        "parent_block_hash": None,
        "token_ids": [first + at for at in range(num_blocks) for _ in range(block_size)],
        "block_size": block_size,
    }


def frames_of(number: int, *events: Any) -> list[bytes]:
    return [b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([1.0, list(events), 0])]


def hear(reader: EventReader, number: int, *events: Any) -> None:
    """All of it, however many turns it takes."""
    reader.receive_batch(frames_of(number, *events))
    while reader.has_work:
        reader.work()


def test_a_member_that_names_more_than_twice_its_blocks_is_forgotten_and_not_believed() -> None:
    index, reader = reader_of(1000)
    hear(reader, 0, stored(0, 1500))
    assert (len(index), reader.is_trusted) == (1500, True)
    with raises_code(MessageError, "too_many_names"):
        hear(reader, 1, stored(1500, 1500))
    assert (reader.num_blocks, reader.is_trusted) == (0, False)


def test_a_member_that_says_no_size_is_believed_up_to_a_bound() -> None:
    _, reader = reader_of(None)
    for number in range(MAX_NAMES // 20_000 + 4):
        hear(reader, number, stored(20_000 * number, 20_000))
    assert reader.is_trusted
    assert MAX_NAMES - 20_000 < reader.num_blocks <= MAX_NAMES


def test_batches_ahead_of_their_turn_are_held_up_to_a_number_of_bytes() -> None:
    _, reader = reader_of(1000)
    for number in range(1, 200):
        reader.receive_batch([b"", number.to_bytes(8, "big"), bytes(1 << 20)])
    assert sum(map(len, reader._held_batches.values())) <= MAX_HELD_BYTES


def test_a_run_of_many_blocks_is_applied_in_parts() -> None:
    _, reader = reader_of(10_000)
    reader.receive_batch(frames_of(0, stored(0, 10_000), {"type": "BlockRemoved", "block_hashes": list(range(5_000))}))
    num_before, num_turns = reader.num_applied, 1
    while reader.has_work:
        reader.work()
        assert reader.num_applied - num_before <= 2 * SLICE_BLOCKS
        num_before, num_turns = reader.num_applied, num_turns + 1
    assert (reader.num_blocks, num_turns >= 15_000 // (2 * SLICE_BLOCKS)) == (5_000, True)


def test_blocks_that_come_and_go_take_no_more_of_the_index() -> None:
    index, reader = reader_of(1000)
    for number in range(500):
        hear(reader, number, stored(number, 3), {"type": "AllBlocksCleared"})
    assert (len(index), index.num_bits) == (0, 1)


def test_blocks_of_a_size_that_no_prompt_is_looked_up_by_are_left_out() -> None:
    _, reader = reader_of(1000)
    hear(reader, 0, stored(0, 10, 16))
    assert (reader.num_blocks, reader.num_orphans) == (0, 10)


@pytest.mark.parametrize(
    "event", [{**stored(0, 1), "block_hashes": [b"x" * 65]}, {"type": "BlockRemoved", "block_hashes": [1] * (1 << 20)}]
)
def test_long_names_and_long_events_are_refused(event: dict[str, Any]) -> None:
    _, reader = reader_of(1000)
    with pytest.raises(MessageError):
        hear(reader, 0, event)


@pytest.mark.parametrize("event", [["AllBlocksCleared"], 1])
def test_a_batch_of_very_many_events_is_refused_before_they_are_read(event: object) -> None:
    with raises_code(MessageError, "too_many_events"):
        open_batch(msgspec.msgpack.encode([1.0, [event] * (MAX_EVENTS + 1), 0]))


def test_a_gateway_leaves_such_a_member_and_keeps_the_good_one(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as news:
            news.setsockopt(zmq.LINGER, 0)
            port = news.bind_to_random_port("tcp://127.0.0.1")
            async with openai_server() as liar, openai_server() as good:
                line = f"{liar.line} events=tcp://127.0.0.1:{port}"
                async with fleet_of(line, good.line) as model:
                    number = 0
                    while "twice its 100 blocks" not in caplog.text:
                        batch = frames_of(number, stored(64 * number, 64, BLOCK_SIZE))
                        await news.send_multipart(batch)
                        number += 1
                        await asyncio.sleep(0.02)
                    await until(lambda: good.line in model.fleet.router.membership.ready_members)
                    assert len(model.fleet.router.index) <= 200

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())


def test_messages_of_events_are_bounded_by_the_socket() -> None:
    assert MAX_BATCH_BYTES <= 16 << 20
