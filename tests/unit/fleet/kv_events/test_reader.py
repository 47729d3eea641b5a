"""What a gateway believes of a member is what the member holds, whatever becomes of its announcements."""

from contextlib import suppress
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import MessageError
from quire.fleet.kv_events.batches import open_batch, read_kv_event
from quire.fleet.kv_events.reader import MAX_HELD, EventReader, MissingRange
from quire.fleet.routing.block_index import BlockIndex
from quire.fleet.routing.block_names import names_of, root_name
from quire.worker.child import kv_snapshot
from quire.worker.child.kv_snapshot import QUIRE_TOPIC, Position, SnapshotEnd, SnapshotPiece, encode_kv_answer
from quire.worker.kv_event_settings import Encoding
from tests.support.fleet.event_members import MEMBER, MODEL, TalkingMember, ask, held_names, new_reader

TOKENS = tuple(range(100, 164))
NAMES = names_of(root_name(MODEL, "", ""), TOKENS, 16)


def batch(*events: Any, at_s: float = 1.0) -> bytes:
    return msgspec.msgpack.encode([at_s, list(events), 0])


def stored(hashes: list[Any], parent: Any = None, tokens: tuple[int, ...] = TOKENS, **more: Any) -> dict[str, Any]:
    told = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens[: 16 * len(hashes)]}
    return {"type": "BlockStored", **told, "block_size": 16, **more}


def as_array(event: dict[str, Any]) -> list[Any]:
    order = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
    return [event.get(key) for key in (*order, "extra_keys", "group_idx", "kv_cache_spec_kind")]


def stranger() -> tuple[BlockIndex, EventReader]:
    return new_reader(has_snapshots=False, block_size=16)


def hear(reader: EventReader, *events: Any, number: int | None = None, at_s: float = 1.0) -> None:
    at = reader.next_number if number is None else number
    reader.receive_batch([b"", at.to_bytes(8, "big"), batch(*events, at_s=at_s)])


# -- events ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [dict, as_array])
@pytest.mark.parametrize("hashes", [[7, 1 << 63, 9, -3], [b"a" * 32, b"b" * 32, b"", b"d"]], ids=["int", "bytes"])
def test_blocks_of_other_makers_get_the_names_that_a_prompt_gets_here(kind: Any, hashes: list[Any]) -> None:
    index, reader = stranger()
    hear(reader, kind(stored(hashes[:2])), kind(stored(hashes[2:], hashes[1], TOKENS[32:])))
    assert index.depths(NAMES) == {MEMBER: 4}
    removed = {"type": "BlockRemoved", "block_hashes": [hashes[3], 12345], "medium": "GPU"}
    hear(reader, removed if kind is dict else list(removed.values()))
    assert index.depths(NAMES) == {MEMBER: 3}
    assert reader.num_blocks == 3
    hear(reader, {"type": "AllBlocksCleared"} if kind is dict else ["AllBlocksCleared"])
    assert index.depths(NAMES) == {}


def test_blocks_after_one_that_is_not_known_are_left_out_and_counted() -> None:
    index, reader = stranger()
    hear(reader, stored([3, 4], 2), stored([5], 4))
    assert (reader.num_orphans, reader.num_blocks) == (3, 0)
    assert held_names(index) == set()


@pytest.mark.parametrize(
    "more",
    [
        {"medium": "CPU"},
        {"group_idx": 1},
        {"lora_name": "other"},
        {"lora_id": 3},
        {"cache_salt": "tenant"},
        {"extra_keys": [["tenant"], ["tenant"]]},
        {"extra_keys": [[["image", 3]], None]},
        {"extra_keys": [["tenant", "more"], None]},
    ],
    ids=str,
)
def test_what_a_plain_prompt_cannot_hit_is_not_counted_for_it(more: dict[str, Any]) -> None:
    index, reader = stranger()
    hear(reader, stored([1, 2], **more))
    assert index.depths(NAMES) == {}


@pytest.mark.parametrize("more", [{"medium": "gpu"}, {"group_idx": 0}, {"cache_salt": ""}, {"extra_keys": [None, []]}])
def test_what_a_plain_prompt_hits_is_counted(more: dict[str, Any]) -> None:
    index, reader = stranger()
    hear(reader, stored([1, 2], **more))
    assert index.depths(NAMES) == {MEMBER: 2}


@pytest.mark.parametrize(
    "more", [{"cache_salt": "tenant"}, {"extra_keys": [["lora", "tenant"], None]}, {"extra_keys": [["tenant"], None]}]
)
def test_adapter_and_cache_group_enter_the_name_as_they_do_for_a_prompt(more: dict[str, Any]) -> None:
    index, reader = stranger()
    hear(reader, stored([1, 2], lora_name="lora", **more))
    assert index.depths(names_of(root_name(MODEL, "lora", "tenant"), TOKENS, 16)) == {MEMBER: 2}


def test_a_block_with_an_image_ends_what_tokens_alone_can_name() -> None:
    index, reader = stranger()
    hear(reader, stored([1, 2, 3], extra_keys=[None, [["image", 3]], None]), stored([4], 2, TOKENS[32:48]))
    assert index.depths(NAMES) == {MEMBER: 1}
    assert reader.num_orphans == 1


def test_kinds_that_are_not_known_are_passed_over() -> None:
    index, reader = stranger()
    hear(reader, {"type": "BlockMoved", "to": 3}, stored([1]), ["Later", 3], as_array(stored([2], 1, TOKENS[16:])))
    assert index.depths(NAMES) == {MEMBER: 2}


def test_blocks_that_leave_another_medium_stay_in_this_one() -> None:
    index, reader = stranger()
    hear(reader, stored([1]), {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"})
    assert index.depths(NAMES) == {MEMBER: 1}


# -- numbers -----------------------------------------------------------------------------------------------------------


def based() -> tuple[TalkingMember, BlockIndex, EventReader]:
    member = TalkingMember(Random(1))
    index, reader = new_reader()
    assert reader.missing is MissingRange.SNAPSHOT
    ask(member, reader)
    return member, index, reader


def worked(member: TalkingMember, num_batches: int) -> list[list[bytes]]:
    """So many published batches."""
    published: list[list[bytes]] = []
    while len(published) < num_batches:
        published += member.work()
    return published


def test_a_missing_batch_is_asked_for_and_later_ones_wait() -> None:
    member, index, reader = based()
    first, second, third = worked(member, 3)
    reader.receive_batch(first)
    before = held_names(index)
    reader.receive_batch(third)
    assert (reader.missing, reader.next_number, held_names(index)) == (MissingRange.REPLAY, 1, before)
    reader.receive_batch(second)
    assert (reader.missing, reader.next_number) == (MissingRange.NOTHING, 3)
    assert held_names(index) == member.names()


def test_what_was_heard_before_changes_nothing() -> None:
    member, index, reader = based()
    published = worked(member, 6)
    for frames in (*published, *published, *reversed(published)):
        reader.receive_batch(frames)
    assert (reader.missing, reader.next_number) == (MissingRange.NOTHING, 6)
    assert held_names(index) == member.names()


def test_a_last_batch_that_was_lost_is_noticed_by_the_members_position() -> None:
    member, index, reader = based()
    worked(member, 1)
    assert reader.missing is MissingRange.NOTHING
    assert not reader.receive_response(member.position())
    assert (reader.missing, reader.has_gap) == (MissingRange.REPLAY, False)
    ask(member, reader)
    assert held_names(index) == member.names()


def test_a_gap_longer_than_what_is_kept_ends_in_a_snapshot() -> None:
    member, index, reader = based()
    member.kept = member.kept.__class__(maxlen=2)
    reader.receive_batch(worked(member, 9)[-1])
    ask(member, reader)
    assert reader.num_replays_short == 1
    assert held_names(index) == member.names()


def test_without_snapshots_such_a_gap_ends_in_what_is_heard_from_then_on() -> None:
    index, reader = stranger()
    hear(reader, stored([1]))
    hear(reader, stored([2], 1, TOKENS[16:]), stored([11]), number=7)
    reader.end_replay(1)
    assert (reader.next_number, reader.num_orphans, reader.missing) == (8, 1, MissingRange.NOTHING)
    assert index.depths(NAMES) == {MEMBER: 1}
    assert reader.num_blocks == 1


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_snapshot, "PIECE_BLOCKS", 2)


@pytest.mark.parametrize("lost", [0, 1, -2])
def test_a_snapshot_with_a_missing_piece_is_asked_for_again(lost: int) -> None:
    member = TalkingMember(Random(6))
    worked(member, 5)
    index, late = new_reader()
    pieces = member.answer(late)
    assert len(pieces) > 3
    del pieces[lost]
    assert [late.receive_response(frames) for frames in pieces] == [False] * (len(pieces) - 1) + [True]
    assert late.missing is MissingRange.SNAPSHOT
    ask(member, late)
    assert held_names(index) == member.names()


def test_batches_that_come_during_a_snapshot_are_applied_after_it() -> None:
    member = TalkingMember(Random(2))
    worked(member, 4)
    index, reader = new_reader()
    *pieces, end = member.answer(reader)
    for frames in worked(member, 2):
        reader.receive_batch(frames)
    for frames in (*pieces, end):
        reader.receive_response(frames)
    assert (reader.missing, reader.next_number) == (MissingRange.NOTHING, 6)
    assert held_names(index) == member.names()


def test_a_second_snapshot_that_nobody_needs_changes_nothing() -> None:
    member, index, reader = based()
    worked(member, 3)
    _, late = new_reader()
    pieces = member.answer(late)
    reader.receive_batch(worked(member, 1)[0])
    ask(member, reader)
    for frames in pieces:
        reader.receive_response(frames)
    assert held_names(index) == member.names()


def test_of_a_new_life_nothing_of_the_former_is_believed() -> None:
    member, index, reader = based()
    for frames in worked(member, 5):
        reader.receive_batch(frames)
    second = TalkingMember(Random(3), b"second")
    worked(second, 2)
    reader.receive_batch(worked(second, 1)[0])
    assert held_names(index) == set()
    ask(second, reader)
    assert held_names(index) == second.names()
    third = TalkingMember(Random(4), b"third")
    reader.receive_response(third.position())
    assert (held_names(index), reader.num_incarnations) == (set(), 2)


def test_where_lives_have_no_names_a_lower_number_of_a_later_time_is_a_new_one() -> None:
    index, reader = stranger()
    hear(reader, stored([1, 2]), at_s=5.0)
    hear(reader, stored([3], 2, TOKENS[32:]), at_s=6.0)
    hear(reader, stored([1]), number=0, at_s=5.0)
    assert index.depths(NAMES) == {MEMBER: 3}
    hear(reader, stored([8]), number=0, at_s=7.0)
    assert (index.depths(NAMES), reader.next_number) == ({MEMBER: 1}, 1)


def test_what_is_believed_to_come_survives_a_beginning_with_nothing() -> None:
    index, reader = new_reader()
    index.expect_blocks(MEMBER, NAMES, 0.0)
    reader.receive_response([b"", QUIRE_TOPIC, encode_kv_answer(SnapshotEnd(b"", 0, 0))])
    hear(reader, {"type": "AllBlocksCleared"})
    assert index.depths(NAMES) == {MEMBER: 4}


def test_what_waits_for_a_missing_batch_is_bounded() -> None:
    _, _, reader = based()
    for number in range(1, MAX_HELD + 100):
        reader.receive_batch([b"first", number.to_bytes(8, "big"), batch()])
    assert len(reader._held_batches) == MAX_HELD
    assert (reader.missing, reader.next_number) == (MissingRange.REPLAY, 0)


# -- any order, any loss -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["map", "array"])
@pytest.mark.parametrize("seed", range(40))
def test_the_index_is_the_truth_again_whatever_was_lost_doubled_or_turned_round(seed: int, encoding: Encoding) -> None:
    random = Random(seed)
    index, reader = new_reader()
    life, num_kept = 0, random.choice((1, 3, 1000))
    member = TalkingMember(random, b"0", num_kept=num_kept, encoding=encoding)
    for _ in range(60):
        published = member.work()
        if random.random() < 0.2:
            published = []
        for frames in published * random.choice((1, 1, 2)):
            reader.receive_batch(frames)
        if random.random() < 0.3:
            answers = member.answer(reader)
            first = reader.next_number
            was = reader.missing
            for frames in answers:
                if random.random() < 0.9 and reader.receive_response(frames) and was is MissingRange.REPLAY:
                    reader.end_replay(first)
        if random.random() < 0.03:
            life += 1
            member = TalkingMember(random, str(life).encode(), num_kept=num_kept, encoding=encoding)
    reader.receive_response(member.position())
    ask(member, reader)
    assert held_names(index) == member.names()
    assert reader.num_blocks == len(member.names())


# -- bytes that are nothing --------------------------------------------------------------------------------------------


def read_all(data: bytes) -> None:
    for raw in open_batch(data).events:
        read_kv_event(raw)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_a_message_error(data: bytes) -> None:
    with suppress(MessageError):
        read_all(data)


@pytest.mark.parametrize("has_snapshots", [True, False])
def test_damaged_messages_raise_message_errors_and_a_snapshot_heals_what_they_did(has_snapshots: bool) -> None:
    random = Random(5)
    member = TalkingMember(random)
    index, reader = new_reader(has_snapshots=has_snapshots)
    num_refused = 0
    for _ in range(1500):
        frames = (member.work() or [[b"", bytes(8), b""]])[0]
        answer = random.choice(member.answer(reader) or [member.position()])
        for hear_one, one in ((reader.receive_batch, frames), (reader.receive_response, answer)):
            damaged = [_damaged(frame, random) for frame in one][: random.choice((1, 2, 9, 9, 9, 9))]
            try:
                hear_one(damaged)
            except MessageError:
                num_refused += 1
    assert num_refused > 500
    if has_snapshots:
        reader._start_incarnation()
        ask(member, reader)
        assert held_names(index) == member.names()


def _damaged(frame: bytes, random: Random) -> bytes:
    if not frame or random.random() < 0.5:
        return frame
    at = random.randrange(len(frame))
    return random.choice((frame[:at], frame[:at] + bytes([random.randrange(256)]) + frame[at + 1 :], frame + b"\0"))


@pytest.mark.parametrize(
    "event",
    [
        stored([1, 2], tokens=TOKENS[:16]),
        stored([1], block_size=0),
        stored([1], tokens=(1 << 32,) * 16),
        stored([1.5]),
        {"type": 3},
        {},
        [],
        3,
    ],
    ids=str,
)
def test_events_that_cannot_be_are_no_batch(event: Any) -> None:
    with pytest.raises(MessageError):
        read_all(batch(event))


def test_after_a_batch_that_is_none_everything_is_asked_for() -> None:
    member, index, reader = based()
    for frames in worked(member, 2):
        reader.receive_batch(frames)
    with pytest.raises(MessageError):
        reader.receive_batch([member.life, (2).to_bytes(8, "big"), b"\xc1"])
    assert reader.missing is MissingRange.SNAPSHOT
    ask(member, reader)
    assert held_names(index) == member.names()


def test_a_piece_that_is_no_batch_does_not_end_in_a_base() -> None:
    _, reader = new_reader()
    with pytest.raises(MessageError):
        reader.receive_response([b"", QUIRE_TOPIC, encode_kv_answer(SnapshotPiece(b"", 0, 0, b"\xc1"))])
    reader.receive_response([b"", QUIRE_TOPIC, encode_kv_answer(SnapshotEnd(b"", 0, 1))])
    assert reader.missing is MissingRange.SNAPSHOT
    reader.receive_response([b"", QUIRE_TOPIC, encode_kv_answer(Position(b"", 3))])
    assert reader.missing is MissingRange.SNAPSHOT
