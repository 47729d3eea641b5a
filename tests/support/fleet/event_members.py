"""Members that say what they hold, without sockets: a real memory, real batches, and a line that may lose them."""

from collections import deque
from random import Random

from quire.core.digests import BlockHasher
from quire.core.events import AllBlocksCleared, KVEvent
from quire.core.memory.kv_config import KVMemoryConfig
from quire.core.memory.kv_memory import KVMemory
from quire.fleet.kv_events.reader import END, EventReader, MissingRange
from quire.fleet.routing.block_index import BlockIndex
from quire.fleet.routing.block_names import names_of, root_name
from quire.worker.child.kv_events import encode_kv_batch
from quire.worker.child.kv_snapshot import QUIRE_TOPIC, Position, SnapshotEnd, SnapshotSender, encode_kv_answer
from quire.worker.kv_event_settings import Encoding
from tests.support.core.shadow import KEY, Listener, namespace

MODEL, MEMBER, BLOCK_SIZE = "model", "tcp://member", 2


class TalkingMember:
    """A worker's memory, and all that it would publish."""

    def __init__(
        self, random: Random, life: bytes = b"first", *, num_kept: int = 1000, encoding: Encoding = "map"
    ) -> None:
        self.random, self.encoding, self.life = random, encoding, life
        self.events: list[KVEvent] = []
        self.truth = Listener()
        self.memory = KVMemory(KVMemoryConfig(12, BLOCK_SIZE), BlockHasher(KEY), self._heard)
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=num_kept)
        self.next_number = 0
        self.snapshots = SnapshotSender(lambda events: encode_kv_batch(0.0, events, encoding))
        self.snapshots.stored_events = self.memory.stored_events

    def _heard(self, event: KVEvent) -> None:
        self.events.append(event)
        self.truth(event)

    def work(self, now_s: float = 1.0) -> list[list[bytes]]:
        """A few prompts, now and then a clear; what is published then."""
        for _ in range(self.random.randint(1, 3)):
            self.compute([self.random.randrange(2) for _ in range(self.random.randint(1, 12))])
        if self.random.random() < 0.05:
            self.memory.clear()
        return self.publish(now_s)

    def compute(self, tokens: list[int]) -> None:
        space = namespace(BLOCK_SIZE, self.random.choice(("", "tenant")))
        table = self.memory.open(space)
        self.memory.match(table, tokens)
        self.memory.reserve(table, tokens, len(tokens) - table.num_computed)
        self.memory.commit(table, len(tokens) - table.num_computed)
        self.memory.release(table)

    def publish(self, now_s: float = 1.0) -> list[list[bytes]]:
        if not self.events:
            return []
        first = [AllBlocksCleared()] if not self.next_number else []
        batch = encode_kv_batch(now_s, [*first, *self.events], self.encoding)
        self.events = []
        self.kept.append((self.next_number, batch))
        self.next_number += 1
        return [[self.life, (self.next_number - 1).to_bytes(8, "big"), batch]]

    def answer(self, reader: EventReader) -> list[list[bytes]]:
        """What it says to the reader's question."""
        if reader.missing is MissingRange.NOTHING:
            return []
        if reader.missing is MissingRange.REPLAY:
            found = [(number, batch) for number, batch in self.kept if number >= reader.next_number]
            replayed = [[b"", self.life, number.to_bytes(8, "big"), batch] for number, batch in found]
            return [*replayed, [b"", b"", END, b""]]
        self.snapshots.request((b"reader",))
        answers = []
        while (told := self.snapshots.next_answer(self.life, self.next_number)) is not None:
            answers.append([b"", QUIRE_TOPIC, encode_kv_answer(told[0])])
            if isinstance(told[0], SnapshotEnd):
                break
        return answers

    def position(self) -> list[bytes]:
        return [b"", QUIRE_TOPIC, encode_kv_answer(Position(self.life, self.next_number))]

    def names(self) -> set[int]:
        """What it holds, as a gateway calls it."""
        found = set()
        for adapter, group, tokens in self.truth.prefixes.values():
            found.add(names_of(root_name(MODEL, adapter, group), tokens, BLOCK_SIZE)[-1])
        return found


def new_reader(*, has_snapshots: bool = True, block_size: int = BLOCK_SIZE) -> tuple[BlockIndex, EventReader]:
    index = BlockIndex(8)
    index.join(MEMBER)
    return index, EventReader(index, MEMBER, MODEL, block_size, 12, has_snapshots=has_snapshots)


def ask(member: TalkingMember, reader: EventReader) -> None:
    """Ask until nothing is wanted any more."""
    for _ in range(10):
        first = reader.next_number
        was = reader.missing
        for frames in member.answer(reader):
            if reader.receive_response(frames) and was is MissingRange.REPLAY:
                reader.end_replay(first)
    assert reader.missing is MissingRange.NOTHING


def held_names(index: BlockIndex, member: str = MEMBER) -> set[int]:
    """All that the member has confirmed to the index."""
    bit = index.holders[member].bit
    return {name for shard in index.confirmed for name, held in shard.items() if held & bit}
