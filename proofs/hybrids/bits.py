"""The same bits of a hybrid in any circumstance: in chunks, in a batch, from a saved state, forked, after a crash.

Without a scheduler: logits of whole sequences, also continued from the recurrent state at every block border. With the
engine: sampled answers with log-probabilities, as in `models/bits`, and again by a new engine that restores the prompt
and the first part of each answer.
"""

from collections.abc import Iterable, Iterator, Sequence
from random import Random

from benchmarks.steps import BLOCK, make_runner, make_store
from proofs.cpu.loading import AUTO, FLOAT32, load_decoder
from proofs.framework.proof import Proof, section
from proofs.models.bits import compare_answers, report_pairs
from proofs.models.llamacpp_converter import convert
from proofs.numerics.native_bits import FedSequence, Harness, Pairs, threads
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
MODELS_IN_8_BITS = ("qwen3-next", "qwen3.5", "granite4")
SIZES = {"max_sequence_tokens": 4096}


class StateHarness(Harness):
    """A harness with a store of recurrent states beside the KV blocks."""

    states: StateStore

    def __init__(self, random: Random, model: Decoder) -> None:
        super().__init__(random, model, NUM_BLOCKS)
        self.states = StateStore(model.slot_size, NUM_SLOTS)
        self._slots = random.sample(range(1, NUM_SLOTS + 1), NUM_SLOTS)

    def begin(
        self, tokens: list[int], after: FedSequence | None = None, slot: int = ZERO_SLOT, done: int = 0
    ) -> FedSequence:
        """Begin a sequence; or continue one from the state in `slot`, with the blocks of `after` before it."""
        shared = [] if after is None else after.blocks[: done // BLOCK]
        count = -(-len(tokens) // BLOCK) - len(shared)
        new_blocks = self.free[:count]
        self.free, self._slots = self.free[count:] + new_blocks, self._slots[1:] + self._slots[:1]
        sequence = FedSequence(tokens, [*shared, *new_blocks], done, slot=self._slots[-1])
        self.states.copy([SlotCopy(slot, sequence.slot)])
        return sequence

    def step(self, sequences: Sequence[FedSequence], counts: Sequence[int]) -> None:
        """Run one step that feeds `counts[i]` tokens of sequence i."""
        pairs = enumerate(zip(sequences, counts, strict=True))
        items = [sequence.item(index, count) for index, (sequence, count) in pairs]
        for sequence, digests in zip(sequences, self.feed(items), strict=True):
            sequence.append(digests)

    def run(self, sequence: FedSequence, ends: Iterable[int]) -> FedSequence:
        """Compute the sequence alone, in chunks that end at these positions."""
        for end in ends:
            sequence.run(self, until=end)
        return sequence


@section("the same bits in any circumstance")
def same_bits(proof: Proof) -> None:
    """Every hybrid; some also with 8-bit weights and integer products."""
    pairs, num_forks = Pairs(), 0
    for name, model in _models(proof):
        harness = StateHarness(proof.random, model)
        texts = [_text(proof.random) for _ in range(proof.sized(quick=2, full=14))]
        references = [harness.run(harness.begin(text), [len(text)]).digests for text in texts]
        for text, digests in zip(texts, references, strict=True):
            _cut_anywhere(proof.random, harness, pairs, text, digests)
            _compare_resumed(harness, pairs, text, digests)
            _compare_forks(proof.random, harness, pairs, text, digests)
        _compare_batch(proof.random, harness, pairs, texts, references)
        num_forks += compare_answers(proof.random, pairs, name, model, proof.sized(quick=3, full=8))
        _compare_restored(proof.random, pairs, model, proof.sized(quick=2, full=6))
    for kind in ("cut", "one_by_one", "border", "forked", "together", "killed"):
        proof.at_least(f"bitexact_{kind}", pairs.counts[kind], proof.sized(quick=1, full=60))
    report_pairs(proof, pairs, num_forks)


def _models(proof: Proof) -> Iterator[tuple[str, Decoder]]:
    for name in architectures.HYBRIDS if proof.is_full else ("qwen3-next", "lfm2", "granite4"):
        yield name, load_decoder(architectures.directory(name), **FLOAT32, **SIZES)
    for name in MODELS_IN_8_BITS if proof.is_full else ():
        file = convert(architectures.directory(name), proof.folder / f"bits-{name}.gguf", "MOSTLY_Q8_0")
        yield f"{name} in 8 bits", load_decoder(file, **AUTO, **SIZES)


def _text(random: Random) -> list[int]:
    length = random.choice([random.randint(2, BLOCK), random.randint(BLOCK, LONGEST)])
    return [random.randrange(3, architectures.VOCABULARY_SIZE) for _ in range(length)]


def _cut_anywhere(random: Random, harness: StateHarness, pairs: Pairs, text: list[int], expected: list[bytes]) -> None:
    """Compare chunks of one token, chunks of random lengths, two chunks cut at each position, and one thread."""
    pairs.compare("one_by_one", harness.run(harness.begin(text), range(1, len(text) + 1)).digests, expected)
    for _ in range(4):
        positions = random.sample(range(1, len(text)), random.randint(0, min(len(text) - 1, 9)))
        pairs.compare("cut", harness.run(harness.begin(text), [*sorted(positions), len(text)]).digests, expected)
    for position in range(1, len(text) if len(text) <= BLOCK // 2 else 1):
        pairs.compare("cut", harness.run(harness.begin(text), [position, len(text)]).digests, expected)
    with threads(1):
        pairs.compare("one_thread", harness.run(harness.begin(text), [len(text)]).digests, expected)


def _compare_resumed(harness: StateHarness, pairs: Pairs, text: list[int], expected: list[bytes]) -> None:
    """Copy the state at each block border, and compute the rest from it as another sequence."""
    source = harness.begin(text)
    for border in range(BLOCK, len(text), BLOCK):
        harness.run(source, [border])
        resumed = harness.begin(text, source, source.slot, border)
        pairs.compare("border", harness.run(resumed, [len(text)]).digests, expected[border:])


def _compare_forks(random: Random, harness: StateHarness, pairs: Pairs, text: list[int], expected: list[bytes]) -> None:
    """Continue two sequences from one state in one batch, with different tokens: neither may affect the other."""
    position = random.randint(1, len(text) - 1)
    parent = harness.run(harness.begin(text), [position])
    fork = harness.begin([*text[:position], *(text[position:][::-1])])
    harness.run(fork, [position])
    harness.states.copy([SlotCopy(parent.slot, fork.slot)])
    while parent.done < len(text):
        harness.step([parent, fork], [1, 1])
    pairs.compare("forked", parent.digests, expected)
    alone = harness.run(harness.begin(fork.tokens), [len(fork.tokens)])
    pairs.compare("forked", fork.digests, alone.digests)


def _compare_batch(
    random: Random, harness: StateHarness, pairs: Pairs, texts: Sequence[list[int]], known: Sequence[list[bytes]]
) -> None:
    """Compare sequences that run in random batches, with one or many tokens per step."""
    sequences = [harness.begin(text) for text in texts]
    while unfinished := [one for one in sequences if one.num_remaining]:
        batch = random.sample(unfinished, random.randint(1, len(unfinished)))
        harness.step(batch, [min(random.choice([1, 1, 5, 33]), one.num_remaining) for one in batch])
    for sequence, expected in zip(sequences, known, strict=True):
        pairs.compare("together", sequence.digests, expected)


def _compare_restored(random: Random, pairs: Pairs, model: Decoder, count: int) -> None:
    """Restore a prompt and the first part of its answer in a new engine with an empty cache, and compare the rest."""
    for _ in range(count):
        ask = Ask(_text(random), random_params(random, 20), random.getrandbits(63))
        Machine(make_runner(model, make_store(model, NUM_BLOCKS))).alone(ask)
        produced = tuple(ask.tokens[: random.randrange(1, len(ask.tokens))]) if len(ask.tokens) > 1 else ()
        machine = Machine(make_runner(model, make_store(model, NUM_BLOCKS)))
        namespace, continuations = machine.engine.info.namespace("group"), (Continuation(0, produced),)
        machine.engine.restore(
            Request("again", tuple(ask.prompt), namespace, 0.0, ask.params, ask.seed, continuations=continuations)
        )
        tokens = list(produced)
        while machine.engine.has_work:
            tokens += [event.token_id for event in machine.engine.step(lambda: 0.0) if isinstance(event, Token)]
        pairs.compare("killed", [bytes(str(tokens), "ascii")], [bytes(str(ask.tokens), "ascii")])
