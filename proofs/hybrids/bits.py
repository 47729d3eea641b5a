"""The same bits of a hybrid in any circumstance: cut anywhere, in company, from a kept state, forked, after a kill.

By hand: logits of whole sequences, whose states are kept at every block border on the way and gone on from. By the
engine: sampled answers with their log-probabilities, as `models/bits` asks for them, and once more by a new engine that
is given the first half of each.
"""

from collections.abc import Iterable, Iterator, Sequence
from random import Random

from benchmarks.steps import BLOCK, make_runner, make_store
from proofs.cpu.loading import AUTO, FLOAT32, load_decoder
from proofs.framework.proof import Proof, section
from proofs.models.bits import answers_in_other_ways, report_pairs
from proofs.models.llamacpp_converter import convert
from proofs.numerics.native_bits import Desk, Life, Pairs, threads
from quire.backends.cpu.decoder import Decoder
from quire.backends.cpu.state_store import StateStore
from quire.core.events import Token
from quire.core.memory.state_slots import ZERO_SLOT
from quire.core.request import Continuation, Request
from quire.core.step import SlotCopy
from tests.support.models import architectures
from tests.support.models.models import Ask, Machine, random_params

NUM_BLOCKS, NUM_SLOTS = 256, 64
LONGEST = 5 * BLOCK
IN_EIGHT_BITS = ("qwen3-next", "qwen3.5", "granite4")
SIZES = {"max_sequence_tokens": 4096}


class StateDesk(Desk):
    """A model with a store of blocks and one of states."""

    states: StateStore

    def __init__(self, random: Random, model: Decoder) -> None:
        super().__init__(random, model, NUM_BLOCKS)
        self.states = StateStore(model.slot_size, NUM_SLOTS)
        self._slots = random.sample(range(1, NUM_SLOTS + 1), NUM_SLOTS)

    def begin(self, tokens: list[int], after: Life | None = None, slot: int = ZERO_SLOT, done: int = 0) -> Life:
        """A sequence from its first token on, or from a state in a slot, with another's blocks before that."""
        shared = [] if after is None else after.blocks[: done // BLOCK]
        count = -(-len(tokens) // BLOCK) - len(shared)
        taken = self.free[:count]
        self.free = self.free[count:] + taken
        self._slots = self._slots[1:] + self._slots[:1]
        life = Life(tokens, [*shared, *taken], done, slot=self._slots[-1])
        self.states.copy([SlotCopy(slot, life.slot)])
        return life

    def step(self, lives: Sequence[Life], counts: Sequence[int]) -> None:
        """One step with so many tokens of each."""
        items = [life.item(at, count) for at, (life, count) in enumerate(zip(lives, counts, strict=True))]
        for life, digests in zip(lives, self.feed(items), strict=True):
            life.take(digests)

    def run(self, life: Life, ends: Iterable[int]) -> Life:
        """Alone, in runs that end there."""
        for end in ends:
            life.run(self, until=end)
        return life


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
        desk.step([parent, other], [1, 1])
    pairs.judge("forked", parent.digests, expected)
    alone = desk.run(desk.begin(other.tokens), [len(other.tokens)])
    pairs.judge("forked", other.digests, alone.digests)


def _together(
    random: Random, desk: StateDesk, pairs: Pairs, texts: Sequence[list[int]], known: Sequence[list[bytes]]
) -> None:
    """All in every step until they are done, some with one token and some with many."""
    lives = [desk.begin(text) for text in texts]
    while waiting := [one for one in lives if one.num_left]:
        chosen = random.sample(waiting, random.randint(1, len(waiting)))
        desk.step(chosen, [min(random.choice([1, 1, 5, 33]), one.num_left) for one in chosen])
    for life, expected in zip(lives, known, strict=True):
        pairs.judge("together", life.digests, expected)


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
