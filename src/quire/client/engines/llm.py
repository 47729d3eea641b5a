"""The simplest way in: a list of prompts, a list of answers, a progress bar between. One thread, no event loop.

llm = LLM("model")
for completion in llm.generate(["Once upon a time", "def main():"], SamplingParams(max_tokens=64)):
    print(completion.text)
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from types import TracebackType
from typing import Any

from quire.checkpoints.progress import show_progress
from quire.client.engines.opening import OpenedModel, open_model
from quire.client.prefix.explanation import Explanation, explanation
from quire.client.reply.live_replies import hand_out
from quire.client.reply.outputs import Completion, Piece
from quire.client.reply.reply import Reply
from quire.client.request.conversation import chat_inputs
from quire.client.request.params import SamplingParams
from quire.client.request.requests import DEFAULT_TENANT, make_request
from quire.client.request.text_model import Messages, TextModel
from quire.config import ModelSettings
from quire.core.events import Refused, RequestEvent
from quire.errors import CapacityError, ConfigError, QuireError

Ticked = Callable[[int, int], None]
"""Called with how many answers are done and how many tokens there are."""
MAX_OPEN = 256
"""Prompts handed to the engine at once; the rest wait here, not in its queue."""


class _Unread:
    """A reply that its caller reads when it is done, or after each step."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    def show(self, pieces: list[Piece]) -> None:
        """They are in the reply already. Raises for a request that was refused or displaced."""
        if self.reply.refusal is not None:
            raise self.reply.refusal


class LLM:
    """A model in this process."""

    def __init__(self, model: str | OpenedModel, settings: ModelSettings | None = None) -> None:
        self._opened = _open(model, settings) if isinstance(model, str) else model
        self._live: dict[str, _Unread] = {}

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def text(self) -> TextModel:
        """The text side of the model: tokenizer, template, end tokens."""
        return self._opened.text

    @property
    def line(self) -> str:
        """How much fits in how much memory."""
        return self._opened.text.info.line

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the model for the person that loaded it."""
        return self._opened.text.notes

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
    ) -> list[Completion]:
        """Answers to all prompts, in their order; a bar on a terminal unless `show_progress` is set."""
        listed: Sequence[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
        return self._run([self.text.prompt(prompt) for prompt in listed], params, show_progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
        **arguments: Any,
    ) -> list[Completion]:
        """Answers to one conversation or to several; `arguments` are those of `ConversationArguments`."""
        is_one = bool(messages) and isinstance(messages[0], dict)
        several: Sequence[Messages] = [messages] if is_one else messages  # type: ignore[list-item, assignment]
        each = zip(several, _one_for_each(params, len(several)), strict=True)
        inputs = [chat_inputs(self.text, one, own, **arguments) for one, own in each]
        return self._run([ids for ids, _ in inputs], [own for _, own in inputs], show_progress)

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[Piece | Completion]:
        """Pieces of one answer as they come, and the completion last. Leaving early ends the request; `is_stopped` is
        called after every step, also while a long prompt brings no piece."""
        reply = self._new_reply(self.text.prompt(prompt), params or SamplingParams())
        try:
            if (error := self._submit(reply)) is not None:
                raise error
            num_shown = 0
            while True:
                # Others step the same engine while this one waits to be read: its pieces may be there already.
                unread = reply.pieces[num_shown:]
                num_shown += len(unread)
                yield from unread
                if num_shown < len(reply.pieces):
                    continue
                if reply.is_done:
                    break
                if is_stopped():
                    # Its last events come with the next step: how it ended, and when.
                    self._opened.engine.cancel(reply.request.request_id)
                self._step()
            yield reply.completion()
        finally:
            self._forget(reply)

    def explain(self, prompt: str | Sequence[int]) -> Explanation:
        """How much of a prompt is cached, and why the next token is not. Nothing is computed."""
        ids = self.text.prompt(prompt)
        namespace = self.text.info.namespace(DEFAULT_TENANT)
        found = self._opened.engine.explain(namespace, tuple(ids), monotonic())
        return explanation(self.text.tokenizer, namespace, ids, found)

    def close(self) -> None:
        """Give the memory back."""
        self._opened.text.close()
        self._opened.engine.close()

    def _run(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool | None,
    ) -> list[Completion]:
        wanted = _one_for_each(params, len(prompts))
        # All are made and checked before the first is computed: a bad one must not cost the answers to the others.
        replies = [self._new_reply(ids, one) for ids, one in zip(prompts, wanted, strict=True)]
        for reply in replies:
            self._opened.engine.check(reply.request)
        waiting = deque(replies)
        try:
            with _bar(len(prompts), show_progress) as tick:
                while waiting or not all(reply.is_done for reply in replies):
                    self._submit_more(waiting)
                    self._step()
                    tick(sum(reply.is_done for reply in replies), sum(reply.num_tokens for reply in replies))
        finally:
            for reply in replies:
                self._forget(reply)
        return [reply.completion() for reply in replies]

    def _new_reply(self, ids: list[int], params: SamplingParams) -> Reply:
        return Reply(make_request(self.text, ids, params), params, self.text.tokenizer, monotonic)

    def _submit_more(self, waiting: deque[Reply]) -> None:
        while waiting and len(self._live) < MAX_OPEN:
            error = self._submit(waiting[0])
            if error is not None:
                if not self._live or not isinstance(error, CapacityError):
                    raise error
                return
            waiting.popleft()

    def _submit(self, reply: Reply) -> QuireError | None:
        event = self._opened.engine.submit(reply.request)
        if isinstance(event, Refused):
            return event.error
        self._live[reply.request.request_id] = _Unread(reply)
        self._hand_out([event])
        return None

    def _step(self) -> None:
        self._hand_out(self._opened.engine.step(monotonic))

    def _hand_out(self, events: Sequence[RequestEvent]) -> None:
        hand_out(events, self._live, self._opened.engine.cancel)

    def _forget(self, reply: Reply) -> None:
        if self._live.pop(reply.request.request_id, None) is not None:
            self._opened.engine.cancel(reply.request.request_id)


def _one_for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    wanted = [params or SamplingParams()] * count if not isinstance(params, Sequence) else list(params)
    if len(wanted) != count:
        rule = f"expected one params for all or one for each of {count} prompts, got {len(wanted)}"
        raise ConfigError(rule, ("params",))
    return wanted


def _open(model: str, settings: ModelSettings | None) -> OpenedModel:
    """With a progress bar on a terminal, in silence elsewhere."""
    if not sys.stderr.isatty():
        return open_model(model, settings)
    with show_progress() as progress:
        return open_model(model, settings, progress=progress)


@contextmanager
def _bar(total: int, wanted: bool | None) -> Iterator[Ticked]:
    """A bar on stderr if it is a terminal, or if it is requested; else nothing."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda _done, _tokens: None
        return
    from rich.console import Console  # noqa: PLC0415 - only a bar that is shown pays
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total, tokens=0)
        yield lambda done, tokens: progress.update(task, completed=done, tokens=tokens)
