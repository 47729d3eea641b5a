"""Offline batch inference: a list of prompts in, a list of answers out, with a progress bar. One thread, no event loop.

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
from quire.client.reply.outputs import Completion, Piece
from quire.client.reply.reply import Reply, dispatch_events
from quire.client.request.conversation import chat_inputs
from quire.client.request.params import SamplingParams
from quire.client.request.requests import DEFAULT_OPTIONS, DEFAULT_TENANT, RequestOptions, make_request
from quire.client.request.text_model import Messages, TextModel
from quire.config import ModelSettings
from quire.core.events import Refused, RequestEvent
from quire.errors import CapacityError, ConfigError, QuireError

ShowCounts = Callable[[int, int], None]
"""Called with the number of finished answers and the number of output tokens."""
OnPromptProgress = Callable[[int, int], None]
"""Called with the number of computed tokens of a prompt and the number of all its tokens."""
MAX_OPEN = 256
"""Maximum prompts submitted to the engine at once; the others wait here, not in the engine's queue."""


class _OpenReply:
    """A reply whose pieces the caller reads after each step or at the end; a `Recipient` of events."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    def show(self, pieces: list[Piece]) -> None:
        """Raise the error if the request was refused or displaced. `pieces` are unused: the reply has them too."""
        if self.reply.refusal is not None:
            raise self.reply.refusal


class LLM:
    """A model in this process, used from one thread."""

    def __init__(self, model: str | OpenedModel, settings: ModelSettings | None = None) -> None:
        self._opened = _open(model, settings) if isinstance(model, str) else model
        self._open_replies: dict[str, _OpenReply] = {}

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def text(self) -> TextModel:
        """The text model: tokenizer, template, EOS tokens."""
        return self._opened.text

    @property
    def line(self) -> str:
        """A line with the model's capacity in tokens and its memory."""
        return self._opened.text.info.line

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the model for the operator."""
        return self._opened.text.notes

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
    ) -> list[Completion]:
        """Return answers to all prompts, in order. `show_progress` None: show a bar if stderr is a terminal."""
        prompt_list: Sequence[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
        return self._run([self.text.prompt(prompt) for prompt in prompt_list], params, show_progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
        **arguments: Any,
    ) -> list[Completion]:
        """Complete one or several conversations; `arguments` are the fields of `ConversationArguments`."""
        is_single = bool(messages) and isinstance(messages[0], dict)
        conversations: Sequence[Messages] = [messages] if is_single else messages  # type: ignore[list-item, assignment]
        pairs = zip(conversations, _params_per_prompt(params, len(conversations)), strict=True)
        inputs = [chat_inputs(self.text, conversation, sampling, **arguments) for conversation, sampling in pairs]
        return self._run([ids for ids, _ in inputs], [sampling for _, sampling in inputs], show_progress)

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        is_stopped: Callable[[], bool] = lambda: False,
        on_progress: OnPromptProgress | None = None,
    ) -> Iterator[Piece | Completion]:
        """Yield pieces of one answer as they arrive, then its completion. Leaving the loop early cancels the request.
        `is_stopped` is called before every step, also during the prefill of a long prompt; true cancels the request.
        `on_progress` is called after every step of the prompt."""
        options = RequestOptions(report_progress=on_progress is not None)
        reply = self._new_reply(self.text.prompt(prompt), params or SamplingParams(), options)
        try:
            if (error := self._submit(reply)) is not None:
                raise error
            num_shown = 0
            while True:
                # While this generator is suspended, other calls may step the same engine and add pieces to the reply.
                unread = reply.pieces[num_shown:]
                num_shown += len(unread)
                yield from unread
                if num_shown < len(reply.pieces):
                    continue
                if reply.is_done:
                    break
                if is_stopped():
                    # The next step emits the last events, with the finish reason.
                    self._opened.engine.cancel(reply.request.request_id)
                self._step()
                if on_progress is not None and not reply.pieces:
                    on_progress(reply.num_processed_tokens, len(reply.request.prompt))
            yield reply.completion()
        finally:
            self._cancel_if_open(reply)

    def explain(self, prompt: str | Sequence[int]) -> Explanation:
        """Return how much of a prompt is cached, and why the rest is not. The model does not run."""
        ids = self.text.prompt(prompt)
        namespace = self.text.info.namespace(DEFAULT_TENANT)
        divergence = self._opened.engine.explain(namespace, tuple(ids), monotonic())
        return explanation(self.text.tokenizer, namespace, ids, divergence)

    def close(self) -> None:
        """Free the model's memory."""
        self._opened.text.close()
        self._opened.engine.close()

    def _run(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool | None,
    ) -> list[Completion]:
        params_list = _params_per_prompt(params, len(prompts))
        # All requests are checked before the first step, so an invalid one cannot discard finished answers of others.
        replies = [self._new_reply(ids, prompt_params) for ids, prompt_params in zip(prompts, params_list, strict=True)]
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
                self._cancel_if_open(reply)
        return [reply.completion() for reply in replies]

    def _new_reply(self, ids: list[int], params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS) -> Reply:
        return Reply(make_request(self.text, ids, params, options), params, self.text.tokenizer, monotonic)

    def _submit_more(self, waiting: deque[Reply]) -> None:
        while waiting and len(self._open_replies) < MAX_OPEN:
            error = self._submit(waiting[0])
            if error is not None:
                if not self._open_replies or not isinstance(error, CapacityError):
                    raise error
                return
            waiting.popleft()

    def _submit(self, reply: Reply) -> QuireError | None:
        event = self._opened.engine.submit(reply.request)
        if isinstance(event, Refused):
            return event.error
        self._open_replies[reply.request.request_id] = _OpenReply(reply)
        self._dispatch([event])
        return None

    def _step(self) -> None:
        self._dispatch(self._opened.engine.step(monotonic))

    def _dispatch(self, events: Sequence[RequestEvent]) -> None:
        dispatch_events(events, self._open_replies, self._opened.engine.cancel)

    def _cancel_if_open(self, reply: Reply) -> None:
        if self._open_replies.pop(reply.request.request_id, None) is not None:
            self._opened.engine.cancel(reply.request.request_id)


def _params_per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    params_list = [params or SamplingParams()] * count if not isinstance(params, Sequence) else list(params)
    if len(params_list) != count:
        message = f"expected one SamplingParams for all, or one for each of {count} prompts, got {len(params_list)}"
        raise ConfigError(message, ("params",))
    return params_list


def _open(model: str, settings: ModelSettings | None) -> OpenedModel:
    """Load a model, with a progress bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        return open_model(model, settings)
    with show_progress() as progress:
        return open_model(model, settings, progress=progress)


@contextmanager
def _bar(total: int, is_shown: bool | None) -> Iterator[ShowCounts]:
    """Show a progress bar on stderr; `is_shown` None: only if stderr is a terminal."""
    if not (sys.stderr.isatty() if is_shown is None else is_shown):
        yield lambda _done, _tokens: None
        return
    from rich.console import Console  # noqa: PLC0415 - imported only if a bar is shown
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total, tokens=0)
        yield lambda done, tokens: progress.update(task, completed=done, tokens=tokens)
