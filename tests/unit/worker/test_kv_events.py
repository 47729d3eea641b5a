"""Cached blocks as routers outside are told of them."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.client.engines.served import ServedModel, Serving
from quire.client.request.params import SamplingParams
from quire.core.digests import block_hash
from quire.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from quire.errors import ConfigError
from quire.worker.child.kv_events import END, KVEventPublisher
from quire.worker.child.kv_snapshot import (
    PIECE_BLOCKS,
    POSITION,
    QUIRE_TOPIC,
    SNAPSHOT,
    KVAnswer,
    Position,
    SnapshotEnd,
    SnapshotPiece,
    decode_kv_answer,
    encode_kv_answer,
)
from quire.worker.kv_event_settings import KVEventSettings
from tests.support.errors import raises_code
from tests.support.servers.talkers import talker
from tests.support.workers.oracle_worker import oracle_plan

FIRST, SECOND = bytes(range(32)), b"\xff" * 32
STORED = BlockStored((FIRST, SECOND), None, (1, 2, 3, 4), 2, "", "group")
REMOVED = BlockRemoved((SECOND,))


class Router:
    """A reader outside: listens, and asks for what it missed."""

    def __init__(self, folder: Path) -> None:
        self.settings = KVEventSettings(f"ipc://{folder / 'events'}", f"ipc://{folder / 'replay'}", topic="kv")
        self._context = zmq.Context()
        self.heard = self._context.socket(zmq.SUB)
        self.heard.subscribe(b"")
        self.heard.connect(self.settings.endpoint)
        self.asking = self._context.socket(zmq.DEALER)
        self.asking.connect(self.settings.replay_endpoint)

    def ask(self, first: int) -> None:
        self.asking.send_multipart([b"", first.to_bytes(8, "big")])

    def answers(self, question: bytes, publisher: KVEventPublisher) -> list[KVAnswer]:
        """What is said in words of our own, up to the last of it."""
        self.asking.send_multipart([b"", question])
        assert publisher.replay_socket.poll(60_000)
        answers: list[KVAnswer] = []
        while not answers or isinstance(answers[-1], SnapshotPiece):
            publisher.publish(9.0)
            assert self.asking.poll(60_000)
            empty, mark, answer = self.asking.recv_multipart()
            assert (empty, mark) == (b"", QUIRE_TOPIC)
            answers.append(decode_kv_answer(answer))
        return answers

    def replayed(self) -> list[list[bytes]]:
        frames: list[list[bytes]] = []
        while not frames or frames[-1][2] != END:
            assert self.asking.poll(60_000)
            frames.append(self.asking.recv_multipart())
        return frames[:-1]

    def close(self) -> None:
        self._context.destroy(linger=0)


def batches(publisher: KVEventPublisher, router: Router) -> list[Any]:
    """All that was published, by way of a replay: a subscriber may have come too late for the first."""
    router.ask(0)
    assert publisher.replay_socket.poll(60_000)
    publisher.publish(9.0)
    return [msgspec.msgpack.decode(frames[3]) for frames in router.replayed()]


@pytest.fixture
def router(tmp_path: Path) -> Any:
    one = Router(tmp_path)
    yield one
    one.close()


def test_a_step_that_changes_the_cache_is_one_numbered_batch_of_maps(router: Router) -> None:
    publisher = KVEventPublisher(router.settings)
    publisher.publish(1.0)
    for event in (STORED, REMOVED):
        publisher.emit(event)
    publisher.publish(2.5)
    publisher.emit(AllBlocksCleared())
    publisher.publish(3.5)
    first, second = batches(publisher, router)
    hashes = [block_hash(FIRST), block_hash(SECOND)]
    stored = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["group"], ["group"]],
        "cache_salt": "group",
    }
    cleared = {"type": "AllBlocksCleared"}
    assert first == [2.5, [cleared, stored, {"type": "BlockRemoved", "block_hashes": [hashes[1]], "medium": "GPU"}], 0]
    assert second == [3.5, [cleared], 0]
    publisher.close()


def test_hashes_fit_signed_integers() -> None:
    assert block_hash(SECOND) == (1 << 63) - 1


def test_older_readers_get_arrays(router: Router) -> None:
    publisher = KVEventPublisher(replace(router.settings, encoding="array"))
    publisher.emit(STORED)
    publisher.publish(1.0)
    ((_, (cleared, event), _),) = batches(publisher, router)
    hashes = [block_hash(FIRST), block_hash(SECOND)]
    assert cleared == ["AllBlocksCleared"]
    assert event == ["BlockStored", hashes, None, [1, 2, 3, 4], 2, None, "GPU", None, [["group"], ["group"]]]
    publisher.close()


def test_what_is_asked_from_a_number_on_is_replayed_from_there_while_it_is_kept(router: Router) -> None:
    publisher = KVEventPublisher(replace(router.settings, num_kept_batches=3))
    for at in range(6):
        publisher.emit(BlockRemoved((bytes([at]) * 32,)))
        publisher.publish(float(at))
    router.ask(4)
    assert publisher.replay_socket.poll(60_000)
    publisher.publish(9.0)
    assert [int.from_bytes(frames[2], "big") for frames in router.replayed()] == [4, 5]
    assert [batch[0] for batch in batches(publisher, router)] == [3.0, 4.0, 5.0]
    publisher.close()


def run_of(start: int, num_blocks: int) -> BlockStored:
    digests = tuple(at.to_bytes(32, "big") for at in range(start, start + num_blocks))
    return BlockStored(digests, None, tuple(range(2 * num_blocks)), 2, "", "group")


def test_a_snapshot_comes_in_pieces_of_bounded_size_and_says_where_to_go_on(router: Router) -> None:
    publisher = KVEventPublisher(router.settings)
    publisher.emit(STORED)
    publisher.publish(1.0)
    stored = [run_of(100 * at, 50) for at in range(30)]
    publisher.enable_snapshots(lambda: iter(stored))
    *pieces, end = router.answers(SNAPSHOT, publisher)
    assert end == SnapshotEnd(b"kv", 1, len(pieces))
    assert [piece.index for piece in pieces if isinstance(piece, SnapshotPiece)] == list(range(len(pieces)))
    told = [msgspec.msgpack.decode(piece.batch) for piece in pieces if isinstance(piece, SnapshotPiece)]
    sizes = [sum(len(event["block_hashes"]) for event in events) for _, events, _ in told]
    assert sum(sizes) == 1500
    assert max(sizes) < PIECE_BLOCKS + 50
    assert not publisher.has_work
    publisher.close()


def test_what_happens_during_a_snapshot_is_told_after_it(router: Router) -> None:
    publisher = KVEventPublisher(router.settings)
    stored = [run_of(0, PIECE_BLOCKS)]
    publisher.enable_snapshots(lambda: iter(list(stored)))
    router.asking.send_multipart([b"", SNAPSHOT])
    assert publisher.replay_socket.poll(60_000)
    publisher.publish(1.0)
    stored.clear()
    publisher.emit(AllBlocksCleared())
    for at in range(3):
        publisher.publish(2.0 + at)
    numbers = []
    for _ in range(2):
        assert router.asking.poll(60_000)
        numbers.append(decode_kv_answer(router.asking.recv_multipart()[2]).number)
    assert numbers == [0, 0]
    assert router.answers(SNAPSHOT, publisher) == [SnapshotEnd(b"kv", 1, 0)]
    publisher.close()


def test_two_who_ask_at_once_share_one_snapshot_and_a_third_gets_the_next(router: Router) -> None:
    publisher = KVEventPublisher(router.settings)
    made = []

    def stored() -> Iterator[BlockStored]:
        made.append(1)
        return iter([STORED])

    publisher.enable_snapshots(stored)
    publisher.snapshots.request((b"a",))
    publisher.snapshots.request((b"b",))
    first = publisher.snapshots.next_answer(b"", 0)
    publisher.snapshots.request((b"c",))
    last = publisher.snapshots.next_answer(b"", 0)
    assert first is not None
    assert last is not None
    assert first[1] == last[1] == ((b"a",), (b"b",))
    after = publisher.snapshots.next_answer(b"", 0)
    assert after is not None
    assert after[1] == ((b"c",),)
    assert len(made) == 2
    publisher.close()


def test_where_a_publisher_stands_can_be_asked_also_by_way_of_another(router: Router) -> None:
    publisher = KVEventPublisher(replace(router.settings, has_incarnation_topic=True))
    (first,) = router.answers(POSITION, publisher)
    publisher.emit(STORED)
    publisher.publish(1.0)
    (second,) = router.answers(POSITION, publisher)
    assert (first, second) == (Position(first.incarnation, 0), Position(first.incarnation, 1))
    assert len(first.incarnation) == 16
    other = KVEventPublisher(KVEventSettings("inproc://other", has_incarnation_topic=True))
    assert other.topic != publisher.topic
    router.asking.send_multipart([b"client", b"", POSITION])
    assert publisher.replay_socket.poll(60_000)
    publisher.publish(2.0)
    assert router.asking.poll(60_000)
    assert router.asking.recv_multipart() == [b"client", b"", QUIRE_TOPIC, encode_kv_answer(second)]
    publisher.close()
    other.close()


def test_questions_of_no_protocol_stay_without_an_answer(router: Router) -> None:
    publisher = KVEventPublisher(router.settings)
    for frames in ([b""], [b"", b"1234567"], [b"", SNAPSHOT], [b"", b"", b"", b"12345678"], [b"", b"\xff" * 9]):
        router.asking.send_multipart(frames)
    assert batches(publisher, router) == []
    assert not router.asking.poll(0)
    publisher.close()


def test_an_address_that_cannot_be_had_is_said_to_be_so() -> None:
    with raises_code(ConfigError, "invalid_config"):
        KVEventPublisher(KVEventSettings("tcp://127.0.0.1:nowhere"))


def test_a_worker_tells_routers_what_its_cache_holds(router: Router) -> None:
    text = talker().text
    plan = oracle_plan(text.vocabulary_size, kv_events=router.settings)

    async def ask() -> None:
        async with ServedModel(lambda: Serving(plan, lambda ready: replace(text, info=ready.info))) as model:
            await model.generate("a question of some length", SamplingParams(max_tokens=8, ignore_eos=True))
            router.ask(0)
            while not router.asking.poll(0):
                await asyncio.sleep(0.01)

    asyncio.run(ask())
    stored = [
        event
        for frames in router.replayed()
        for event in msgspec.msgpack.decode(frames[3])[1]
        if event.get("block_size")
    ]
    ids = [token for event in stored for token in event["token_ids"]]
    prompt = text.prompt("a question of some length")
    assert ids[: len(prompt) // 4 * 4] == prompt[: len(prompt) // 4 * 4]
    parents = [event["parent_block_hash"] for event in stored]
    assert parents == [None, *(event["block_hashes"][-1] for event in stored[:-1])]


def test_a_second_worker_announces_on_the_next_port() -> None:
    settings = KVEventSettings("tcp://*:5557", "ipc:///tmp/replay")
    assert settings.of_worker(0) == settings
    second = settings.of_worker(1)
    assert (second.endpoint, second.replay_endpoint) == ("tcp://*:5558", "ipc:///tmp/replay-1")
