"""A worker whose model is a script: scheduler, memory, prefix tree and grammars are real, tokens are written for it.

    python -m proofs.agents.clients_run.scripted_worker SOCKET PAGE LEASH PARENT

Each answer is tokenised as the model's tokenizer does it and given out token by token; a token that the request's
grammar forbids is an error of the row, so that what a good model writes is known to be allowed. Every request that
ended is a line of the diary: its prompt and answer in tokens, and how many of the prompt's tokens the runner was fed.
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
"""Where it is written."""
POOL_TOKENS = 1 << 20
"""Blocks cost nothing here: several agents' conversations are kept."""
TURN_BEGIN, TURN_END = "<|im_start|>", "<|im_end|>"


class Script:
    """Prompts and answers in one model's tokens."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        tokenizer = read_tokenizer(checkpoint)
        self.tokenizer: Tokenizer = tokenizer.limited(1 << 24, 1 << 20)
        begin, end = (tokenizer.library.token_to_id(mark) for mark in (TURN_BEGIN, TURN_END))
        assert begin is not None, f"a script needs a model whose turns begin with {TURN_BEGIN}"
        assert end is not None, f"a script needs a model whose turns end with {TURN_END}"
        self.begin, self.end = begin, end

    def turns(self, prompt: Sequence[int]) -> list[Turn]:
        """By the marks alone: a text that looks like a mark is none."""
        starts = [at for at, token_id in enumerate(prompt) if token_id == self.begin]
        turns = []
        for start, stop in zip(starts, [*starts[1:], len(prompt)], strict=True):
            text = self.tokenizer.decode([one for one in prompt[start + 1 : stop] if one != self.end], False)
            role, _, said = text.partition("\n")
            turns.append(Turn(role, said))
        return turns[:-1]  # the last one is to be written

    def num_opening(self, prompt: Sequence[int]) -> int:
        """Tokens before the first turn that is the user's: tools and system."""
        user = self.tokenizer.encode("user", False)
        starts = (at for at, token_id in enumerate(prompt) if token_id == self.begin)
        return next((at for at in starts if [*prompt[at + 1 : at + 1 + len(user)]] == user), len(prompt))

    def answer(self, prompt: Sequence[int]) -> bytes:
        """What is to be written."""
        return answer(self.turns(prompt)).encode()

    def next_token(self, text: bytes, produced: Sequence[int], mask: bytes | None) -> int | None:
        """The one that follows what was produced, as the tokenizer cuts it where the grammar lets it; None: the text
        cannot go on as it should.
        """
        written = b"".join(map(self.tokenizer.token_bytes, produced))
        if not text.startswith(written):
            return None
        if written == text:
            return self.end if _is_allowed(self.end, mask) else None
        whole = self.tokenizer.encode(text.decode(), False)
        rest = text[len(written) :].decode("utf-8", "surrogateescape")
        is_whole = [*produced] == whole[: len(produced)]
        wanted = whole[len(produced)] if is_whole else self.tokenizer.encode(rest, False)[0]
        if _is_allowed(wanted, mask):
            return wanted
        lengths = range(len(rest) - 1, 0, -1)
        shorter = (self.tokenizer.encode(rest[:length], False) for length in lengths)
        return next((ids[0] for ids in shorter if len(ids) == 1 and _is_allowed(ids[0], mask)), None)


def _is_allowed(token_id: int, mask: bytes | None) -> bool:
    return mask is None or bool(mask[token_id // 8] >> token_id % 8 & 1)


@dataclass
class Asked:
    """A request on its way."""

    sequence: scheduled.Sequence
    text: bytes = b""
    num_opening: int = 0
    num_fed: int = 0
    """Prompt tokens that had to be computed."""


class ScriptedRunner:
    """Computes nothing. Which requests its rows are of it is told by the scheduler."""

    scheduler: Scheduler
    """Handed in once there is one."""

    def __init__(self, capacity: Capacity, script: Script) -> None:
        self._capacity = capacity
        self._script = script
        self.asked: dict[str, Asked] = {}
        """By the requests' ids."""

    @property
    def capacity(self) -> Capacity:
        """Fixed at load."""
        return self._capacity

    def start(self, plan: StepPlan) -> PendingStep:
        """Everything is done when it is waited for."""
        return _ScriptedStep(self, plan)

    def run(self, plan: StepPlan, masks: Masks) -> StepResult:
        """The next token of every row that wants one."""
        pairs = zip(plan.items, self.scheduler.planned, strict=True)
        return StepResult(plan.step, {item.sequence_id: self._row(item, one, masks) for item, one in pairs})

    def _row(self, item: WorkItem, sequence: scheduled.Sequence, masks: Masks) -> RowResult:
        asked = self.asked.setdefault(sequence.request.request_id, Asked(sequence))
        num_prompt = sequence.num_prompt_tokens
        asked.num_fed += max(0, min(num_prompt, item.first_position + len(item.token_ids)) - item.first_position)
        if item.sampling is None:
            return RowResult()
        if not asked.text:
            asked.text = self._script.answer(sequence.tokens[:num_prompt])
            asked.num_opening = self._script.num_opening(sequence.tokens[:num_prompt])
        mask = masks[item.sequence_id][0] if item.sequence_id in masks else None
        token_id = self._script.next_token(asked.text, sequence.tokens[num_prompt:], mask)
        if token_id is None:
            produced = self._script.tokenizer.decode(sequence.tokens[num_prompt:], False)
            message = f"the script's {asked.text!r} cannot be written behind {produced!r}"
            return RowResult(error=RowError(ROW_FAILED, message))
        return RowResult((token_id,))

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """There is nothing in them."""
        return [b"" for _ in block_ids]

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        """There is nothing to put."""

    def close(self) -> None:
        """There is nothing to give back."""


@dataclass(frozen=True, slots=True)
class _ScriptedStep:
    runner: ScriptedRunner
    plan: StepPlan

    def wait(self, masks: Masks = NO_MASKS) -> StepResult:
        return self.runner.run(self.plan, masks)


class DiaryEngine(Engine):
    """Writes down every request that has ended."""

    runner: ScriptedRunner
    diary: Path

    def step(self, clock: Clock, on_start: OnStepStart = lambda _ids: None) -> list[RequestEvent]:
        """As it is, and then the diary."""
        events = super().step(clock, on_start)
        reasons = {event.request_id: event.reason.value for event in events if isinstance(event, SequenceFinished)}
        for event in events:
            if isinstance(event, Finished) and event.request_id in self.runner.asked:
                self._write(event, self.runner.asked.pop(event.request_id), reasons[event.request_id])
        return events

    def _write(self, event: Finished, asked: Asked, reason: str) -> None:
        tokens, num_prompt = asked.sequence.tokens, asked.sequence.num_prompt_tokens
        line: dict[str, Any] = {
            "prompt": tokens[:num_prompt],
            "answer": tokens[num_prompt:],
            "num_fed": asked.num_fed,
            "num_opening": asked.num_opening,
            "num_cached_tokens": event.num_cached_tokens,
            "text": asked.text.decode(),
            "reason": reason,
        }
        with self.diary.open("a") as diary:
            diary.write(json.dumps(line) + "\n")


def open_scripted(command: Open, _progress: Progress, emit: Emit | None) -> Engine:
    """The checkpoint's tokenizer and limits, none of its weights."""
    checkpoint, settings = resolve(command.model), command.settings
    size, longest = int(checkpoint.config["vocab_size"]), int(checkpoint.config["max_position_embeddings"])
    capacity = Capacity(
        POOL_TOKENS // settings.block_size, settings.block_size, longest, settings.max_step_tokens, size, 0
    )
    config = SchedulerConfig(settings.max_step_tokens, settings.max_running, longest, queue=command.queue)
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
