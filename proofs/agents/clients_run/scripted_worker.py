"""A worker whose model is a script: scheduler, memory, prefix tree and grammars are real; a script chooses tokens.

    python -m proofs.agents.clients_run.scripted_worker SOCKET PAGE LEASH PARENT

The model's tokenizer encodes each scripted answer, which is returned token by token. A token that the request's grammar
forbids fails the row: so grammars are known to allow what a good model writes. Every finished request is a line of the
diary, a JSONL file: its prompt and answer in tokens, and the number of prompt tokens that the runner had to compute.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proofs.agents.clients_run.scripted_model import Turn, answer
from quire.backends.protocol import Capacity, PendingStep
from quire.checkpoints import Checkpoint, Progress, resolve
from quire.checkpoints.grammar_vocabulary import grammar_tokens, grammar_vocabulary
from quire.client.request.text_model import read_tokenizer
from quire.core.events import Finished, RequestEvent, SequenceFinished
from quire.core.scheduling import sequence as scheduled
from quire.core.scheduling.scheduler import Scheduler
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.step import NO_MASKS, ROW_FAILED, Masks, RowError, RowResult, StepPlan, StepResult, WorkItem
from quire.engine.engine import Clock, Engine, ModelIdentity, OnStepStart
from quire.engine.guides import GrammarMatchers
from quire.text.tokenizer import Tokenizer
from quire.worker.child.process import Emit, run_worker
from quire.worker.messages import Open

DIARY = "SCRIPTED_DIARY"
"""The environment variable with the path of the diary."""
POOL_TOKENS = 1 << 20
"""Blocks cost nothing here, so the conversations of several agents stay cached."""
TURN_BEGIN, TURN_END = "<|im_start|>", "<|im_end|>"


class Script:
    """Reads prompts and writes answers in the tokens of one model."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        tokenizer = read_tokenizer(checkpoint)
        self.tokenizer: Tokenizer = tokenizer.limited(1 << 24, 1 << 20)
        begin, end = (tokenizer.library.token_to_id(mark) for mark in (TURN_BEGIN, TURN_END))
        assert begin is not None, f"a script needs a model whose turns begin with {TURN_BEGIN}"
        assert end is not None, f"a script needs a model whose turns end with {TURN_END}"
        self.begin, self.end = begin, end

    def turns(self, prompt: Sequence[int]) -> list[Turn]:
        """Split a prompt into turns by its control tokens; a text that looks like one does not split."""
        starts = [index for index, token in enumerate(prompt) if token == self.begin]
        turns = []
        for start, stop in zip(starts, [*starts[1:], len(prompt)], strict=True):
            text = self.tokenizer.decode([token for token in prompt[start + 1 : stop] if token != self.end], False)
            role, _, content = text.partition("\n")
            turns.append(Turn(role, content))
        return turns[:-1]  # the last turn is the one to write

    def num_opening(self, prompt: Sequence[int]) -> int:
        """The number of tokens before the first user turn: tools and system prompt."""
        user = self.tokenizer.encode("user", False)
        starts = (i for i, token in enumerate(prompt) if token == self.begin)
        return next((i for i in starts if [*prompt[i + 1 : i + 1 + len(user)]] == user), len(prompt))

    def answer(self, prompt: Sequence[int]) -> bytes:
        """The text of the answer to a prompt."""
        return answer(self.turns(prompt)).encode()

    def next_token(self, text: bytes, produced: Sequence[int], mask: bytes | None) -> int | None:
        """The token after `produced` on the way to `text`: the tokenizer's own token if the mask allows it, else a
        shorter one, else None.
        """
        prefix = b"".join(map(self.tokenizer.token_bytes, produced))
        if not text.startswith(prefix):
            return None
        if prefix == text:
            return self.end if _is_allowed(self.end, mask) else None
        full_ids = self.tokenizer.encode(text.decode(), False)
        remaining = text[len(prefix) :].decode("utf-8", "surrogateescape")
        follows_tokenizer = [*produced] == full_ids[: len(produced)]
        token_id = full_ids[len(produced)] if follows_tokenizer else self.tokenizer.encode(remaining, False)[0]
        if _is_allowed(token_id, mask):
            return token_id
        lengths = range(len(remaining) - 1, 0, -1)
        shorter = (self.tokenizer.encode(remaining[:length], False) for length in lengths)
        return next((ids[0] for ids in shorter if len(ids) == 1 and _is_allowed(ids[0], mask)), None)


def _is_allowed(token_id: int, mask: bytes | None) -> bool:
    return mask is None or bool(mask[token_id // 8] >> token_id % 8 & 1)


@dataclass
class RequestState:
    """The state of a request that runs."""

    sequence: scheduled.Sequence
    text: bytes = b""
    num_opening: int = 0
    num_fed: int = 0
    """Prompt tokens that the runner had to compute."""


class ScriptedRunner:
    """A runner that computes nothing. It takes the requests of its rows from the scheduler."""

    scheduler: Scheduler
    """Set after the engine has made it."""

    def __init__(self, capacity: Capacity, script: Script) -> None:
        self._capacity = capacity
        self._script = script
        self.states: dict[str, RequestState] = {}
        """Request id -> its state."""

    @property
    def capacity(self) -> Capacity:
        """The capacity, fixed at load."""
        return self._capacity

    def start(self, plan: StepPlan) -> PendingStep:
        """Return a step that runs in its `wait`."""
        return _ScriptedStep(self, plan)

    def run(self, plan: StepPlan, masks: Masks) -> StepResult:
        """The next token of every row that samples."""
        pairs = zip(plan.items, self.scheduler.planned, strict=True)
        return StepResult(plan.step, {item.sequence_id: self._row(item, sequence, masks) for item, sequence in pairs})

    def _row(self, item: WorkItem, sequence: scheduled.Sequence, masks: Masks) -> RowResult:
        state = self.states.setdefault(sequence.request.request_id, RequestState(sequence))
        num_prompt = sequence.num_prompt_tokens
        state.num_fed += max(0, min(num_prompt, item.first_position + len(item.token_ids)) - item.first_position)
        if item.sampling is None:
            return RowResult()
        if not state.text:
            state.text = self._script.answer(sequence.tokens[:num_prompt])
            state.num_opening = self._script.num_opening(sequence.tokens[:num_prompt])
        mask = masks[item.sequence_id][0] if item.sequence_id in masks else None
        token_id = self._script.next_token(state.text, sequence.tokens[num_prompt:], mask)
        if token_id is None:
            produced = self._script.tokenizer.decode(sequence.tokens[num_prompt:], False)
            message = f"the script's {state.text!r} cannot continue {produced!r}"
            return RowResult(error=RowError(ROW_FAILED, message))
        return RowResult((token_id,))

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Blocks have no content here."""
        return [b"" for _ in block_ids]

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        """Blocks have no content here."""

    def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True, slots=True)
class _ScriptedStep:
    runner: ScriptedRunner
    plan: StepPlan

    def wait(self, masks: Masks = NO_MASKS) -> StepResult:
        return self.runner.run(self.plan, masks)


class DiaryEngine(Engine):
    """An engine that adds every finished request to the diary."""

    runner: ScriptedRunner
    diary: Path

    def step(self, clock: Clock, on_start: OnStepStart = lambda _ids: None) -> list[RequestEvent]:
        """Run a step, then write the diary."""
        events = super().step(clock, on_start)
        reasons = {event.request_id: event.reason.value for event in events if isinstance(event, SequenceFinished)}
        for event in events:
            if isinstance(event, Finished) and event.request_id in self.runner.states:
                self._write(event, self.runner.states.pop(event.request_id), reasons[event.request_id])
        return events

    def _write(self, event: Finished, state: RequestState, reason: str) -> None:
        tokens, num_prompt = state.sequence.tokens, state.sequence.num_prompt_tokens
        line: dict[str, Any] = {
            "prompt": tokens[:num_prompt],
            "answer": tokens[num_prompt:],
            "num_fed": state.num_fed,
            "num_opening": state.num_opening,
            "num_cached_tokens": event.num_cached_tokens,
            "text": state.text.decode(),
            "reason": reason,
        }
        with self.diary.open("a") as diary:
            diary.write(json.dumps(line) + "\n")


def open_scripted(command: Open, _progress: Progress, emit: Emit | None) -> Engine:
    """Open an engine with the checkpoint's tokenizer and limits, without its weights."""
    checkpoint, settings = resolve(command.model), command.settings
    size, max_tokens = int(checkpoint.config["vocab_size"]), int(checkpoint.config["max_position_embeddings"])
    capacity = Capacity(
        POOL_TOKENS // settings.block_size, settings.block_size, max_tokens, settings.max_step_tokens, size, 0
    )
    config = SchedulerConfig(settings.max_step_tokens, settings.max_running, max_tokens, queue=command.queue)
    runner = ScriptedRunner(capacity, Script(checkpoint))
    tokenizer_json, end_tokens = grammar_tokens(checkpoint)
    guides = GrammarMatchers(lambda: grammar_vocabulary(tokenizer_json, size, end_tokens))
    engine = DiaryEngine(runner, config, ModelIdentity("scripted", "none"), command.key, emit, guides)
    engine.info = replace(engine.info, line="a script")
    engine.diary = Path(os.environ[DIARY])
    runner.scheduler = engine.scheduler
    return engine


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1:], open_scripted))
