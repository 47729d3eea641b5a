"""The simplest way in: a list of prompts, a list of answers, a progress bar between. One thread, no event loop.

llm = LLM("model")
for completion in llm.generate(["Once upon a time", "def main():"], SamplingParams(max_tokens=64)):
    print(completion.text)
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from types import TracebackType
from typing import Unpack

from quire.checkpoints import Progress, quiet
from quire.config import ModelSettings
from quire.core.events import RequestEvent
from quire.engine.answers import Completion, Piece
from quire.engine.asking import make_request
from quire.engine.chat_template import TemplateArguments
from quire.engine.opening import OpenedModel, open_model
from quire.engine.parameters import SamplingParams
from quire.engine.reply import Reply
from quire.engine.text_model import Messages, TextModel
from quire.errors import CapacityError, ConfigError

Ticked = Callable[[int, int], None]
"""Told how many answers are done and how many tokens there are."""
MAX_OPEN = 256
"""Prompts handed to the engine at once; the rest wait here, not in its queue."""


class LLM:
    """A model in this process."""

    def __init__(
        self, model: str | OpenedModel, settings: ModelSettings | None = None, *, progress: Progress = quiet
    ) -> None:
        self._opened = open_model(model, settings, progress=progress) if isinstance(model, str) else model
        self._replies: dict[str, Reply] = {}

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def text(self) -> TextModel:
        """The model's words: tokenizer, template, ends."""
        return self._opened.text

    @property
    def line(self) -> str:
        """How much fits in how much memory."""
        return self._opened.line

    @property
    def notes(self) -> tuple[str, ...]:
        """What the person who loaded the model should know."""
        return self._opened.notes

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
    ) -> list[Completion]:
        """Answers to all prompts, in their order; a bar on a terminal unless told otherwise."""
        listed: Sequence[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
        return self._run([self.text.prompt(prompt) for prompt in listed], params, show_progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
        **arguments: Unpack[TemplateArguments],
    ) -> list[Completion]:
        """Answers to one conversation or to several."""
        is_one = bool(messages) and isinstance(messages[0], dict)
        several: Sequence[Messages] = [messages] if is_one else messages  # type: ignore[list-item, assignment]
        return self._run([self.text.chat(one, **arguments) for one in several], params, show_progress)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[Piece | Completion]:
        """Pieces of one answer as they come, and the completion last. Leaving early ends the request."""
        reply = self._submit(self.text.prompt(prompt), params or SamplingParams())
        try:
            while not reply.is_done:
                for _, pieces in self._step():
                    yield from pieces
            yield reply.completion()
        finally:
            self._forget(reply)

    def close(self) -> None:
        """Give the memory back."""
        self._opened.engine.close()

    def _run(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool | None,
    ) -> list[Completion]:
        wanted = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(wanted) != len(prompts):
            raise ConfigError(
                f"params must be one for all or one for each of {len(prompts)} prompts, {len(wanted)} given"
            )
        replies: list[Reply] = []
        num_tokens = num_done = 0
        try:
            with _bar(len(prompts), show_progress) as tick:
                while len(replies) < len(prompts) or num_done < len(prompts):
                    self._submit_more(replies, prompts, wanted)
                    for reply, pieces in self._step():
                        num_tokens += sum(len(piece.token_ids) for piece in pieces)
                        num_done += reply.is_done
                    tick(num_done, num_tokens)
        finally:
            for reply in replies:
                self._forget(reply)
        return [reply.completion() for reply in replies]

    def _submit_more(
        self, replies: list[Reply], prompts: Sequence[list[int]], wanted: Sequence[SamplingParams]
    ) -> None:
        while len(replies) < len(prompts) and len(self._replies) < MAX_OPEN:
            try:
                replies.append(self._submit(prompts[len(replies)], wanted[len(replies)]))
            except CapacityError:
                if not self._replies:
                    raise
                return

    def _submit(self, ids: list[int], params: SamplingParams) -> Reply:
        request = make_request(self._opened, ids, params)
        self._opened.engine.submit(request)
        reply = self._replies[request.request_id] = Reply(request, params, self.text.tokenizer)
        return reply

    def _step(self) -> list[tuple[Reply, list[Piece]]]:
        """One step; what it added to whom."""
        by_request: dict[str, list[RequestEvent]] = {}
        for event in self._opened.engine.step(monotonic()):
            by_request.setdefault(event.request_id, []).append(event)
        told = []
        for request_id, events in by_request.items():
            reply = self._replies.get(request_id)
            if reply is None:
                continue
            told.append((reply, reply.take(events)))
            if reply.is_done:
                del self._replies[request_id]
            elif reply.is_answered:
                self._opened.engine.cancel(request_id)
        return told

    def _forget(self, reply: Reply) -> None:
        if self._replies.pop(reply.request.request_id, None) is not None:
            self._opened.engine.cancel(reply.request.request_id)


@contextmanager
def _bar(total: int, wanted: bool | None) -> Iterator[Ticked]:
    """A bar on stderr if it is a terminal, or if it was asked for; else nothing."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda _done, _tokens: None
        return
    from rich.console import Console  # noqa: PLC0415 - only who looks pays
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total, tokens=0)
        yield lambda done, tokens: progress.update(task, completed=done, tokens=tokens)
