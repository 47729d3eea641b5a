"""What grammars cost a step: the masks of sixteen answers and the following of their tokens, in processor time.

No model computes: a runner spells documents that match the ten schemas, as each vocabulary would write them, so that
both vocabularies are asked the same. All threads of the process are counted, because the library fills masks on one of
its own. Warm means that the engine has answered all these schemas before: grammars are compiled, answers are new.
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
"""Answers with each of the ten documents, in each round."""
OWN_SIZE, BLOCK, MAX_STEP_TOKENS, PROMPT = 49_152, 16, 1024, (5, 6, 7)
DOCUMENTS = tuple(json.dumps(task.document, ensure_ascii=False).encode() for task in TEN)
"""Each as a grammar wants it: a blank behind colons and commas."""


class CountedGuides(GrammarMatchers):
    """Guides that note what each step cost the whole process."""

    def __init__(self, read_vocabulary: Callable[[], LLTokenizer]) -> None:
        super().__init__(read_vocabulary)
        self.steps: list[tuple[int, float, float]] = []
        """Of each step: guided rows, seconds for their masks, seconds for following what was chosen."""

    def masks(self, plan: StepPlan, planned: Sequence[scheduled.Sequence]) -> Masks:
        """As they are, with the time taken."""
        started_s = process_time()
        made = super().masks(plan, planned)
        self.steps.append((len(made), process_time() - started_s, 0.0))
        return made

    def apply(self, plan: StepPlan, planned: Sequence[scheduled.Sequence], result: StepResult) -> StepResult:
        """The same for what follows."""
        started_s = process_time()
        found = super().apply(plan, planned, result)
        num_rows, masks_s, _ = self.steps[-1]
        self.steps[-1] = (num_rows, masks_s, process_time() - started_s)
        return found


class SpellingRunner:
    """Spells documents token by token: a request's seed says which."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._vocabulary = vocabulary
        self._known: dict[int, list[int]] = {}
        """What was fed of each sequence."""

    @property
    def capacity(self) -> Capacity:
        return Capacity(4096, BLOCK, 1 << 20, MAX_STEP_TOKENS, self._vocabulary.vocab_size, 32)

    def start(self, plan: StepPlan) -> PendingStep:
        return _Spelling(self, plan)

    def spelt(self, item: WorkItem, masks: Masks) -> RowResult:
        """The next token of its document, which its mask must allow."""
        known = self._known.setdefault(item.sequence_id, [])
        known[item.first_position :] = item.token_ids
        if item.sampling is None:
            return RowResult()
        document = DOCUMENTS[item.sampling.seed % len(DOCUMENTS)]
        written = self._vocabulary.decode_bytes(known[len(PROMPT) :])
        if not document.startswith(written):
            raise RuntimeError(f"{written!r} was written instead of {document!r}")
        left = document[len(written) :]
        token = self._vocabulary.tokenize_bytes(left)[0] if left else self._vocabulary.eos_token
        (mask,) = masks[item.sequence_id]
        if not mask[token // 8] >> token % 8 & 1:
            raise RuntimeError(f"token {token}, which begins {left!r}, is not allowed")
        return RowResult((token,))

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        raise NotImplementedError

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """It holds nothing."""


class _Spelling:
    def __init__(self, runner: SpellingRunner, plan: StepPlan) -> None:
        self._runner, self._plan = runner, plan

    def wait(self, masks: Masks = NO_MASKS) -> StepResult:
        rows = {item.sequence_id: self._runner.spelt(item, masks) for item in self._plan.items}
        return StepResult(self._plan.step, rows)


def own_vocabulary() -> LLTokenizer:
    """The test model's tokens."""
    tokenizer_json, end_tokens = grammar_tokens(smollm2())
    return grammar_vocabulary(tokenizer_json, OWN_SIZE, end_tokens)


def spelling_rounds(vocabulary: LLTokenizer, count: int) -> list[list[tuple[float, float]]]:
    """For each round of an engine's life, what every step of sixteen rows cost: its masks, and what followed."""
    guides = CountedGuides(lambda: vocabulary)
    config = SchedulerConfig(max_step_tokens=MAX_STEP_TOKENS, max_running=BATCH)
    engine = Engine(SpellingRunner(vocabulary), config, ModelIdentity("documents", ""), bytes(32), guides=guides)
    rounds = []
    for turn in range(count):
        guides.steps.clear()
        _answer_documents(engine, frozenset(vocabulary.eos_tokens), turn)
        rounds.append([(masks_s, taken_s) for rows, masks_s, taken_s in guides.steps if rows == BATCH])
    return rounds


def _answer_documents(engine: Engine, ends: frozenset[int], turn: int) -> None:
    """All documents, `COPIES` times each, sixteen at a time. Raises RuntimeError if one does not come whole."""
    for at in range(COPIES * len(TEN)):
        namespace, params = engine.info.namespace("documents"), ResolvedSampling(max_tokens=512, stop_token_ids=ends)
        grammar = schema_grammar(TEN[at % len(TEN)].name).text
        told = engine.submit(Request(f"{turn} {at}", PROMPT, namespace, 0.0, params, at, grammar=grammar))
        if isinstance(told, Refused):
            raise told.error
    while engine.has_work:
        for event in engine.step(monotonic):
            if isinstance(event, SequenceFinished) and event.reason is not FinishReason.STOP:
                raise RuntimeError(f"document {event.request_id} ended by {event.reason.value}: {event.error}")


@section("guide_ms")
def guide_ms(proof: Proof) -> None:
    """Rounds of the same documents; the first of them is cold and is told apart."""
    for name, read, bound in (("49k", own_vocabulary, 2.5), ("130k", tekken_vocabulary, 4.0)):
        vocabulary = read()
        cold, *warm = spelling_rounds(vocabulary, 1 + proof.sized(quick=4, full=15))
        steps = [step for one in warm for step in one]
        masks_ms = 1000 * mean(masks_s for masks_s, _ in steps)
        say(f"    {vocabulary.vocab_size} tokens: {len(steps)} steps, of each {masks_ms:.3f} ms for masks")
        proof.at_least(f"guide_steps_{name}", len(steps), proof.sized(quick=100, full=500), f"of {BATCH} rows")
        proof.report(f"guide_ms_{name}_cold", 1000 * mean(map(sum, cold)), "the first round, the mean of its steps")
        proof.report(f"guide_ms_{name}_p99", 1000 * quantiles(map(sum, steps), n=100)[98])
        typical_s = median(mean(map(sum, one)) for one in warm)
        proof.at_most(f"guide_ms_{name}", 1000 * typical_s, bound, "the mean of a round's steps, the median of rounds")
