"""Many callers, one engine: each awaits its own answer while one thread steps for all.

async with AsyncEngine("model") as engine:
    async for piece in engine.stream("Once upon a time"):
        print(piece.text, end="")
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Unpack

from quire.config import ModelSettings
from quire.core.events import RequestEvent
from quire.engine.answers import Completion, Piece
from quire.engine.asking import How, make_request
from quire.engine.chat_template import TemplateArguments
from quire.engine.opening import OpenedModel, open_model
from quire.engine.parameters import SamplingParams
from quire.engine.reply import Reply
from quire.engine.stepper import Stepper
from quire.engine.stream import Stream
from quire.engine.text_model import Messages, TextModel
from quire.errors import ConfigError, EngineDeadError, QuireError

Prompt = str | Sequence[int]


class ChatArguments(TemplateArguments, How, total=False):
    """What a template takes, and what may be said of a request."""


@dataclass(slots=True)
class _Open:
    reply: Reply
    stream: Stream


class AsyncEngine:
    """A model that any number of tasks on one event loop may ask."""

    def __init__(self, model: str | OpenedModel, settings: ModelSettings | None = None) -> None:
        self._model = model
        self._settings = settings
        self._opened: OpenedModel | None = None
        self._stepper: Stepper | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[str, _Open] = {}
        self._failure: QuireError | None = None

    async def __aenter__(self) -> "AsyncEngine":
        self._loop = asyncio.get_running_loop()
        if isinstance(self._model, str):
            self._opened = await asyncio.to_thread(open_model, self._model, self._settings)
        else:
            self._opened = self._model
        self._stepper = Stepper(self._opened.engine, self._on_events, self._on_failure)
        self._stepper.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._stepper is not None:
                await asyncio.shield(asyncio.to_thread(self._stepper.close))
        finally:
            self._end_all(EngineDeadError("the engine was closed while requests were running"))

    @property
    def text(self) -> TextModel:
        """The model's words: tokenizer, template, ends."""
        return self._started()[1].text

    @property
    def line(self) -> str:
        """How much fits in how much memory."""
        return self._started()[1].line

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **how: Unpack[How]) -> Completion:
        """The whole answer to a prompt."""
        return await self._whole(await self._prompt_ids(prompt), params, **how)

    async def chat(
        self, messages: Messages, params: SamplingParams | None = None, **arguments: Unpack[ChatArguments]
    ) -> Completion:
        """The whole answer to a conversation."""
        ids, how = await self._conversation(messages, arguments)
        return await self._whole(ids, params, **how)

    async def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **arguments: Unpack[ChatArguments]
    ) -> AsyncIterator[Piece]:
        """The answer to a conversation piece by piece."""
        ids, how = await self._conversation(messages, arguments)
        async for piece in self.stream(ids, params, **how):
            yield piece

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **how: Unpack[How]
    ) -> AsyncIterator[Piece]:
        """The answer piece by piece. Leaving the loop early ends the request."""
        opened = await self._submit(await self._prompt_ids(prompt), params, **how)
        try:
            async for piece in opened.stream:
                yield piece
        finally:
            self._leave(opened)

    async def _whole(self, ids: list[int], params: SamplingParams | None, **how: Unpack[How]) -> Completion:
        opened = await self._submit(ids, params, **how)
        try:
            async for _ in opened.stream:
                pass
        finally:
            self._leave(opened)
        return opened.reply.completion()

    def _leave(self, opened: _Open) -> None:
        opened.stream.close()
        self._open.pop(opened.stream.request_id, None)

    async def _conversation(self, messages: Messages, arguments: ChatArguments) -> tuple[list[int], How]:
        """Its tokens, and what was said of the request beside what the template takes."""
        how = {name: value for name, value in arguments.items() if name in How.__annotations__}
        rest = {name: value for name, value in arguments.items() if name not in how}
        ids = await asyncio.to_thread(lambda: self.text.chat(messages, **rest))  # type: ignore[arg-type]
        return ids, how  # type: ignore[return-value]

    async def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            self.text.tokenizer.check(prompt)
            return self.text.prompt(await self.text.tokenizer.encode_off_loop(prompt, add_special_tokens=True))
        return self.text.prompt(prompt)

    async def _submit(self, ids: list[int], params: SamplingParams | None, **how: Unpack[How]) -> _Open:
        stepper, model = self._started()
        if self._failure is not None:
            raise self._failure
        request = make_request(model, ids, params or SamplingParams(), **how)
        stream = Stream(request.request_id, stepper.cancel)
        opened = _Open(Reply(request, params or SamplingParams(), model.text.tokenizer), stream)
        accepted: asyncio.Future[QuireError | None] = asyncio.get_running_loop().create_future()
        self._open[request.request_id] = opened
        stepper.submit(request, lambda error: self._on_loop(_settle, accepted, error))
        try:
            error = await accepted
        except BaseException:
            self._leave(opened)
            raise
        if error is not None:
            stream.end()
            self._leave(opened)
            raise error
        return opened

    def _started(self) -> tuple[Stepper, OpenedModel]:
        if self._stepper is None or self._opened is None:
            raise ConfigError("an AsyncEngine must be entered first: async with AsyncEngine(model) as engine")
        return self._stepper, self._opened

    # -- on the stepping thread ----------------------------------------------------------------------------------------

    def _on_events(self, events: Sequence[RequestEvent]) -> None:
        self._on_loop(self._dispatch, events)

    def _on_failure(self, error: BaseException) -> None:
        self._on_loop(self._die, error)

    def _on_loop(self, call: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None:
            # A loop that was closed under a running engine has nobody left to tell.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call, *arguments)

    # -- on the event loop ---------------------------------------------------------------------------------------------

    def _dispatch(self, events: Sequence[RequestEvent]) -> None:
        by_request: dict[str, list[RequestEvent]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, own in by_request.items():
            opened = self._open.get(request_id)
            if opened is not None:
                self._tell(opened, own)

    def _tell(self, opened: _Open, events: Sequence[RequestEvent]) -> None:
        reply, stream = opened.reply, opened.stream
        was_answered = reply.is_answered
        pieces = reply.take(events)
        if pieces:
            stream.put(pieces)
        if reply.is_done:
            stream.end()
        elif reply.is_answered and not was_answered:
            self._started()[0].cancel(stream.request_id)

    def _die(self, error: BaseException) -> None:
        self._failure = EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}")
        self._failure.__cause__ = error
        self._end_all(self._failure)

    def _end_all(self, error: QuireError) -> None:
        for opened in self._open.values():
            opened.stream.end(error)


def _settle(future: "asyncio.Future[QuireError | None]", error: QuireError | None) -> None:
    if not future.done():
        future.set_result(error)
