"""The same bits of a hybrid in any circumstance: cut anywhere, in company, from a kept state, forked, after a kill.

By hand: logits of whole sequences, whose states are kept at every block border on the way and gone on from. By the
engine: sampled answers with their log-probabilities, as `models/bits` asks for them, and once more by a new engine that
is given the first half of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

import numpy as np

from benchmarks.steps import BLOCK, make_runner, make_store
from proofs.cpu.loading import AUTO, FLOAT32, load_decoder
from proofs.framework.proof import Proof, section
from proofs.models.bits import answers_in_other_ways, report_pairs
from proofs.models.llamacpp_converter import convert
from proofs.numerics.native_bits import Pairs, threads
from quire.backends.cpu.decoder import Decoder
from quire.backends.cpu.state_store import StateStore
from quire.backends.host.batch import make_batch
from quire.core.events import Token
from quire.core.memory.state_slots import ZERO_SLOT
from quire.core.request import Continuation, Request
from quire.core.step import SlotCopy, WorkItem
from tests.support.models import architectures
from tests.support.models.models import Ask, Machine, random_params

NUM_BLOCKS, NUM_SLOTS = 256, 64
LONGEST = 5 * BLOCK
IN_EIGHT_BITS = ("qwen3-next", "qwen3.5", "granite4")
SIZES = {"max_sequence_tokens": 4096}


@dataclass
class Strand:
    """One sequence, fed by hand: its blocks and its slot, how far it is, and the digests of its rows."""

    tokens: list[int]
    blocks: list[int]
    slot: int
    done: int = 0
    digests: list[bytes] = field(default_factory=list)

    def item(self, number: int, count: int) -> WorkItem:
        fed = tuple(self.tokens[self.done : self.done + count])
        return WorkItem(number, fed, self.done, tuple(self.blocks), state_slot=self.slot)


class StateDesk:
    """A model with a store of blocks and one of states; every row's logits become a digest."""

    def __init__(self, random: Random, model: Decoder) -> None:
        self._model = model
        self._store = make_store(model, NUM_BLOCKS)
        self.states = StateStore(model.slot_size, NUM_SLOTS)
        self._blocks = random.sample(range(1, NUM_BLOCKS + 1), NUM_BLOCKS)
        self._slots = random.sample(range(1, NUM_SLOTS + 1), NUM_SLOTS)

    def begin(self, tokens: list[int], after: Strand | None = None, slot: int = ZERO_SLOT, done: int = 0) -> Strand:
        """A sequence from its first token on, or from a state in a slot, with another's blocks before that."""
        shared = [] if after is None else after.blocks[: done // BLOCK]
        count = -(-len(tokens) // BLOCK) - len(shared)
        taken = self._blocks[:count]
        self._blocks = self._blocks[count:] + taken
        self._slots = self._slots[1:] + self._slots[:1]
        strand = Strand(tokens, [*shared, *taken], self._slots[-1], done)
        self.states.copy([SlotCopy(slot, strand.slot)])
        return strand

    def feed(self, strands: Sequence[Strand], counts: Sequence[int]) -> None:
        """One step with so many tokens of each."""
        items = [strand.item(at, count) for at, (strand, count) in enumerate(zip(strands, counts, strict=True))]
        batch = make_batch(items, BLOCK)
        rows = np.arange(sum(counts))
        logits = self._model.compute(batch, self._store, rows, states=self.states).logits
        digests = [blake2b(row, digest_size=16).digest() for row in logits]
        for strand, count, first in zip(strands, counts, batch.first_rows, strict=True):
            strand.digests += digests[first : first + count]
            strand.done += count

    def run(self, strand: Strand, ends: Sequence[int]) -> Strand:
        """Alone, in runs that end there."""
        for end in ends:
            self.feed([strand], [end - strand.done])
        return strand


@section("the same bits in any circumstance")
def same_bits(proof: Proof) -> None:
    """Every hybrid, and some with weights in 8 bits and integer products."""
    pairs, num_forks = Pairs(), 0
    for name, model in _models(proof):
        desk = StateDesk(proof.random, model)
        texts = [_text(proof.random) for _ in range(proof.sized(quick=2, full=14))]
        known = [desk.run(desk.begin(text), [len(text)]).digests for text in texts]
        for text, digests in zip(texts, known, strict=True):
            _other_cuts(proof.random, desk, pairs, text, digests)
            _from_every_border(desk, pairs, text, digests)
            _forked(proof.random, desk, pairs, text, digests)
        _together(proof.random, desk, pairs, texts, known)
        num_forks += answers_in_other_ways(proof.random, pairs, name, model, proof.sized(quick=3, full=8))
        _after_a_kill(proof.random, pairs, model, proof.sized(quick=2, full=6))
    for kind in ("cut", "one_by_one", "border", "forked", "together", "killed"):
        proof.at_least(f"bitexact_{kind}", pairs.counts[kind], proof.sized(quick=1, full=60))
    report_pairs(proof, pairs, num_forks)


def _models(proof: Proof) -> Iterator[tuple[str, Decoder]]:
    for name in architectures.HYBRIDS if proof.is_full else ("qwen3-next", "lfm2", "granite4"):
        yield name, load_decoder(architectures.directory(name), **FLOAT32, **SIZES)
    for name in IN_EIGHT_BITS if proof.is_full else ():
        file = convert(architectures.directory(name), proof.folder / f"bits-{name}.gguf", "MOSTLY_Q8_0")
        yield f"{name} in 8 bits", load_decoder(file, **AUTO, **SIZES)


def _text(random: Random) -> list[int]:
    length = random.choice([random.randint(2, BLOCK), random.randint(BLOCK, LONGEST)])
    return [random.randrange(3, architectures.VOCABULARY_SIZE) for _ in range(length)]


def _other_cuts(random: Random, desk: StateDesk, pairs: Pairs, text: list[int], expected: list[bytes]) -> None:
    """In runs of one token, in runs of any lengths, at each single place of a short text; on one thread."""
    pairs.judge("one_by_one", desk.run(desk.begin(text), range(1, len(text) + 1)).digests, expected)
    for _ in range(4):
        places = random.sample(range(1, len(text)), random.randint(0, min(len(text) - 1, 9)))
        pairs.judge("cut", desk.run(desk.begin(text), [*sorted(places), len(text)]).digests, expected)
    for at in range(1, len(text) if len(text) <= BLOCK // 2 else 1):
        pairs.judge("cut", desk.run(desk.begin(text), [at, len(text)]).digests, expected)
    with threads(1):
        pairs.judge("one_thread", desk.run(desk.begin(text), [len(text)]).digests, expected)


def _from_every_border(desk: StateDesk, pairs: Pairs, text: list[int], expected: list[bytes]) -> None:
    """A state is kept at each block border; from each of them the rest is computed again, by another sequence."""
    first = desk.begin(text)
    for border in range(BLOCK, len(text), BLOCK):
        desk.run(first, [border])
        again = desk.begin(text, first, first.slot, border)
        pairs.judge("border", desk.run(again, [len(text)]).digests, expected[border:])


def _forked(random: Random, desk: StateDesk, pairs: Pairs, text: list[int], expected: list[bytes]) -> None:
    """Two go on from one state, in turn: one with the same tokens, one with others, which must not be noticed."""
    at = random.randint(1, len(text) - 1)
    parent = desk.run(desk.begin(text), [at])
    other = desk.begin([*text[:at], *(text[at:][::-1])])
    desk.run(other, [at])
    desk.states.copy([SlotCopy(parent.slot, other.slot)])
    while parent.done < len(text):
        desk.feed([parent, other], [1, 1])
    pairs.judge("forked", parent.digests, expected)
    alone = desk.run(desk.begin(other.tokens), [len(other.tokens)])
    pairs.judge("forked", other.digests, alone.digests)


def _together(
    random: Random, desk: StateDesk, pairs: Pairs, texts: Sequence[list[int]], known: Sequence[list[bytes]]
) -> None:
    """All in every step until they are done, some with one token and some with many."""
    strands = [desk.begin(text) for text in texts]
    while waiting := [one for one in strands if one.done < len(one.tokens)]:
        chosen = random.sample(waiting, random.randint(1, len(waiting)))
        desk.feed(chosen, [min(random.choice([1, 1, 5, 33]), len(one.tokens) - one.done) for one in chosen])
    for strand, expected in zip(strands, known, strict=True):
        pairs.judge("together", strand.digests, expected)


def _after_a_kill(random: Random, pairs: Pairs, model: Decoder, count: int) -> None:
    """A new engine with an empty memory is given the prompt and the first part of an answer."""
    for _ in range(count):
        ask = Ask(_text(random), random_params(random, 20), random.getrandbits(63))
        Machine(make_runner(model, make_store(model, NUM_BLOCKS))).alone(ask)
        produced = tuple(ask.tokens[: random.randrange(1, len(ask.tokens))]) if len(ask.tokens) > 1 else ()
        machine = Machine(make_runner(model, make_store(model, NUM_BLOCKS)))
        request = Request(
            "again",
            tuple(ask.prompt),
            machine.engine.info.namespace("group"),
            0.0,
            ask.params,
            ask.seed,
            continuations=(Continuation(0, produced),),
        )
        machine.engine.restore(request)
        found = list(produced)
        while machine.engine.has_work:
            found += [one.token_id for one in machine.engine.step(lambda: 0.0) if isinstance(one, Token)]
        pairs.judge("killed", [bytes(str(found), "ascii")], [bytes(str(ask.tokens), "ascii")])
