"""The processor time that grammars take of a step: to make the masks of sixteen rows, and to apply the chosen tokens.

No model computes: a runner writes documents that match the ten schemas, token by token, so that both vocabularies have
equal work. All threads of the process are counted, because the library fills masks in a thread of its own. A warm round
is one after the first: all grammars are compiled, answers are new.
"""

import json
from collections.abc import Callable, Sequence
from statistics import mean, median, quantiles
from time import monotonic, process_time

from llguidance import LLTokenizer

from benchmarks.record import say
from benchmarks.test_model import smollm2
from proofs.framework.proof import Proof, section
from proofs.steps.asked import BATCH, schema_grammar
from proofs.steps.schemas import TEN
from proofs.steps.tekken import tekken_vocabulary
from quire.backends.protocol import Capacity, PendingStep
from quire.checkpoints.grammar_vocabulary import grammar_tokens, grammar_vocabulary
from quire.core.events import Refused, SequenceFinished
from quire.core.request import FinishReason, Request, ResolvedSampling
from quire.core.scheduling import sequence as scheduled
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.step import NO_MASKS, Masks, RowResult, StepPlan, StepResult, WorkItem
from quire.engine.engine import Engine, ModelIdentity
from quire.engine.guides import GrammarMatchers

COPIES = 8
"""The number of answers with each of the ten documents, in each round."""
VOCABULARY_SIZE, BLOCK, MAX_STEP_TOKENS, PROMPT = 49_152, 16, 1024, (5, 6, 7)
DOCUMENTS = tuple(json.dumps(task.document, ensure_ascii=False).encode() for task in TEN)
"""Each in the form that a grammar wants: a blank after colons and commas."""


class TimedMatchers(GrammarMatchers):
    """Grammar matchers that record the processor time of each step, over all threads of the process."""

    def __init__(self, read_vocabulary: Callable[[], LLTokenizer]) -> None:
        super().__init__(read_vocabulary)
        self.steps: list[tuple[int, float, float]] = []
        """Of each step: rows with a grammar, seconds to make their masks, seconds to apply the chosen tokens."""

    def masks(self, plan: StepPlan, planned: Sequence[scheduled.Sequence]) -> Masks:
        """Make the masks, and record the time."""
        start_s = process_time()
        masks_by_sequence = super().masks(plan, planned)
        self.steps.append((len(masks_by_sequence), process_time() - start_s, 0.0))
        return masks_by_sequence

    def apply(self, plan: StepPlan, planned: Sequence[scheduled.Sequence], result: StepResult) -> StepResult:
        """Apply the chosen tokens, and record the time."""
        start_s = process_time()
        new_result = super().apply(plan, planned, result)
        num_rows, masks_s, _ = self.steps[-1]
        self.steps[-1] = (num_rows, masks_s, process_time() - start_s)
        return new_result


class DocumentRunner:
    """A runner that writes documents token by token: the seed of a request is the index of its document."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._vocabulary = vocabulary
        self._fed_tokens: dict[int, list[int]] = {}
        """Sequence id -> the tokens that were fed."""

    @property
    def capacity(self) -> Capacity:
        return Capacity(4096, BLOCK, 1 << 20, MAX_STEP_TOKENS, self._vocabulary.vocab_size, 32)

    def start(self, plan: StepPlan) -> PendingStep:
        return _DocumentStep(self, plan)

    def next_token(self, item: WorkItem, masks: Masks) -> RowResult:
        """The next token of its document, which its mask must allow."""
        tokens = self._fed_tokens.setdefault(item.sequence_id, [])
        tokens[item.first_position :] = item.token_ids
        if item.sampling is None:
            return RowResult()
        document = DOCUMENTS[item.sampling.seed % len(DOCUMENTS)]
        written = self._vocabulary.decode_bytes(tokens[len(PROMPT) :])
        if not document.startswith(written):
            raise RuntimeError(f"expected the beginning of {document!r}, got {written!r}")
        remaining = document[len(written) :]
        token = self._vocabulary.tokenize_bytes(remaining)[0] if remaining else self._vocabulary.eos_token
        (mask,) = masks[item.sequence_id]
        if not mask[token // 8] >> token % 8 & 1:
            raise RuntimeError(f"token {token}, which begins {remaining!r}, is not allowed")
        return RowResult((token,))

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        raise NotImplementedError

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to release."""


class _DocumentStep:
    def __init__(self, runner: DocumentRunner, plan: StepPlan) -> None:
        self._runner, self._plan = runner, plan

    def wait(self, masks: Masks = NO_MASKS) -> StepResult:
        rows = {item.sequence_id: self._runner.next_token(item, masks) for item in self._plan.items}
        return StepResult(self._plan.step, rows)


def smollm2_vocabulary() -> LLTokenizer:
    """The vocabulary of the test model."""
    tokenizer_json, end_tokens = grammar_tokens(smollm2())
    return grammar_vocabulary(tokenizer_json, VOCABULARY_SIZE, end_tokens)


def measure_rounds(vocabulary: LLTokenizer, count: int) -> list[list[tuple[float, float]]]:
    """For each round on one engine, the seconds of every step of sixteen rows: for masks, and for the chosen tokens."""
    guides = TimedMatchers(lambda: vocabulary)
    config = SchedulerConfig(max_step_tokens=MAX_STEP_TOKENS, max_running=BATCH)
    engine = Engine(DocumentRunner(vocabulary), config, ModelIdentity("documents", ""), bytes(32), guides=guides)
    rounds = []
    for round_number in range(count):
        guides.steps.clear()
        _answer_documents(engine, frozenset(vocabulary.eos_tokens), round_number)
        rounds.append([(masks_s, apply_s) for rows, masks_s, apply_s in guides.steps if rows == BATCH])
    return rounds


def _answer_documents(engine: Engine, ends: frozenset[int], turn: int) -> None:
    """Answer each document `COPIES` times, sixteen rows at a time. Raises RuntimeError if one is incomplete."""
    for number in range(COPIES * len(TEN)):
        namespace, params = engine.info.namespace("documents"), ResolvedSampling(max_tokens=512, stop_token_ids=ends)
        grammar = schema_grammar(TEN[number % len(TEN)].name).text
        result = engine.submit(Request(f"{turn} {number}", PROMPT, namespace, 0.0, params, number, grammar=grammar))
        if isinstance(result, Refused):
            raise result.error
    while engine.has_work:
        for event in engine.step(monotonic):
            if isinstance(event, SequenceFinished) and event.reason is not FinishReason.STOP:
                raise RuntimeError(f"document {event.request_id} ended by {event.reason.value}: {event.error}")


@section("guide_ms")
def guide_ms(proof: Proof) -> None:
    """Measure rounds of the same documents; the first one is cold, and is reported apart."""
    for name, read_vocabulary, bound in (("49k", smollm2_vocabulary, 2.5), ("130k", tekken_vocabulary, 4.0)):
        vocabulary = read_vocabulary()
        cold, *warm = measure_rounds(vocabulary, 1 + proof.sized(quick=4, full=15))
        steps = [step for steps_of_round in warm for step in steps_of_round]
        masks_ms = 1000 * mean(masks_s for masks_s, _ in steps)
        say(f"    {vocabulary.vocab_size} tokens: {len(steps)} steps, of each {masks_ms:.3f} ms for masks")
        proof.at_least(f"guide_steps_{name}", len(steps), proof.sized(quick=100, full=500), f"of {BATCH} rows")
        proof.report(f"guide_ms_{name}_cold", 1000 * mean(map(sum, cold)), "the first round, the mean of its steps")
        proof.report(f"guide_ms_{name}_p99", 1000 * quantiles(map(sum, steps), n=100)[98])
        typical_s = median(mean(map(sum, steps_of_round)) for steps_of_round in warm)
        proof.at_most(f"guide_ms_{name}", 1000 * typical_s, bound, "the mean of a round's steps, the median of rounds")
