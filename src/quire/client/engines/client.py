"""Many callers on one event loop, one model: each awaits its own answer. Where the model runs is behind a port.

    generate · chat · stream ─► request ─► port (a thread that steps, or a supervised worker)
             pieces ◄─ reply ◄─ events ◄─┘

Whatever becomes of a request comes as its events, that it was refused too. A port may tell them on any thread; they are
heard on the event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Unpack
from uuid import uuid4

from quire.client.engines.engine_view import EngineView
from quire.client.prefix.explanation import Explanation, explanation
from quire.client.reply.live_replies import hand_out
from quire.client.reply.outputs import Completion, Piece
from quire.client.reply.reply import Reply
from quire.client.reply.stream import RequestHandle
from quire.client.request.conversation import ConversationArguments, asked_in_python
from quire.client.request.params import SamplingParams
from quire.client.request.requests import DEFAULT_TENANT, RequestOptions, checked_name, make_request
from quire.client.request.text_model import Messages, TextModel
from quire.client.request.text_pool import TextPool
from quire.core.divergence import Divergence
from quire.core.events import Explained, Refused, RequestEvent
from quire.core.request import Request
from quire.core.scheduling.shares import Verdict
from quire.core.work_budget import WorkSpent
from quire.engine.port import EnginePort
from quire.errors import CapacityError, ConfigError, EngineDeadError, InvariantError, QuireError
from quire.text.chat.rendering.template import TemplateArguments
from quire.text.text_work import TextBudget

Prompt = str | Sequence[int]
MAX_EXPLAINS = 16
"""Questions about one model's cache under way at once: each holds up the steps of everybody for a moment."""


class ChatArguments(ConversationArguments, RequestOptions, total=False):
    """What a conversation may be told, and what may be said of a request."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine counts about itself, as far as it can tell from here."""

    num_blocks: int = 0
    block_size: int = 0
    kv_usage: float = 0.0
    """Share of blocks in use, 0 to 1."""
    num_preemptions: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_restarts: int = 0
    step_sizes: tuple[tuple[str, int], ...] = ()
    """Steps that computed at most so many tokens, bound after bound."""
    num_step_tokens: int = 0
    num_draft_tokens: int = 0
    """Guesses that steps checked."""
    num_accepted_tokens: int = 0
    """Of those, right."""
    num_forced_tokens: int = 0
    """Tokens that grammars left no choice about."""
    grammar_compile_s: float = 0.0
    grammar_mask_s: float = 0.0
    """Processor time of what grammars allow, step by step."""
    num_snapshots: int = 0
    """Made for those who watch."""
    step_s: float = 0.0
    """For how long the step in flight has run."""
    work: WorkSpent = field(default_factory=WorkSpent)
    """On grammars in the worker, or of members in a gateway."""


@dataclass(frozen=True, slots=True)
class FleetMemberStats:
    """A member of a fleet, as its gateway knows it."""

    address: str
    state: str
    """As the router sees it: only `ready` gets requests."""
    num_requests: int
    """Of this gateway's, at this moment."""
    num_tokens_in_flight: int
    """Prompt tokens that it has still to compute, of all gateways."""
    num_blocks: int
    kv_usage: float
    """Share of blocks in use, 0 to 1."""
    exactness: str
    """Members with the same one give the same bits; empty: nobody can tell."""


@dataclass(frozen=True, slots=True)
class FleetStats:
    """Where a model runs that several machines compute."""

    members: tuple[FleetMemberStats, ...]
    num_moved: int
    """Requests that went on with another member."""
    num_moved_inexact: int
    """Of these, to one that may compute other bits."""
    num_quarantined: int
    num_held: int
    """Requests that no member has at this moment."""
    num_gateways: int
    """That members hear, this one among them."""


class EngineClient:
    """A model that any number of tasks on one event loop may ask."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port: EnginePort | None = None
        self._text: TextModel | None = None
        self._live: dict[str, RequestHandle] = {}
        self._text_pool = TextPool()
        self._failure: QuireError | None = None
        self._view: EngineView | None = None
        self._verdicts: Sequence[Verdict] = ()
        self._turned_away: dict[tuple[str, str], Verdict] = {}
        """The same by tenant and class, less what was let through since."""
        self._questions: dict[str, asyncio.Future[Divergence | QuireError]] = {}
        """About the cache, and not answered yet, whether or not anybody still waits."""

    @property
    def text(self) -> TextModel:
        """The model's words: tokenizer, template, ends; and what is known of it."""
        return self._started()[1]

    @property
    def is_ready(self) -> bool:
        """It would answer now."""
        return self.is_alive

    @property
    def is_busy(self) -> bool:
        """It is ready, and its step in flight is a long one."""
        return False

    def stats(self) -> EngineStats | None:
        """What its engine counts; None if it cannot tell."""
        return None

    @property
    def num_gateways(self) -> int:
        """Servers that ask the same engines: where one machine computes, this one."""
        return 1

    def fleet_stats(self) -> FleetStats | None:
        """Of the members that compute it; None: it is computed here."""
        return None

    def clear_cache(self) -> None:
        """Forget every cached block that nobody uses."""
        self._started()[0].clear_cache()

    async def set_aside(self) -> None:
        """Give the memory back that it computes in. What it answers waits; its words stay."""
        raise InvariantError(f"an {type(self).__name__} computes in this process and cannot be set aside")

    async def go_on(self) -> None:
        """Load it again; what was set aside continues."""
        raise InvariantError(f"an {type(self).__name__} was never set aside")

    @property
    def view(self) -> EngineView:
        """Through which it is watched."""
        if self._view is None:
            self._view = EngineView(self._started()[0].watching, self._on_loop)
        return self._view

    @property
    def num_open(self) -> int:
        """Requests that have not had their last event, and somebody waits for it."""
        return len(self._live)

    @property
    def is_alive(self) -> bool:
        """It was entered and has not failed."""
        return self._port is not None and self._failure is None

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Completion:
        """The whole answer to a prompt."""
        return await self._whole(
            await self.prompt_ids(prompt, options.get("tenant", DEFAULT_TENANT)), params, **options
        )

    async def chat(
        self, messages: Messages, params: SamplingParams | None = None, **arguments: Unpack[ChatArguments]
    ) -> Completion:
        """The whole answer to a conversation."""
        ids, params, options = await self._conversation(messages, params, arguments)
        return await self._whole(ids, params, **options)

    async def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **arguments: Unpack[ChatArguments]
    ) -> AsyncIterator[Piece]:
        """The answer to a conversation piece by piece."""
        ids, params, options = await self._conversation(messages, params, arguments)
        async for piece in self.stream(ids, params, **options):
            yield piece

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[Piece]:
        """The answer piece by piece. Leaving the loop early ends the request."""
        asked = self.ask(await self.prompt_ids(prompt, options.get("tenant", DEFAULT_TENANT)), params, **options)
        try:
            async for piece in asked:
                yield piece
        finally:
            asked.close()

    def ask(
        self, ids: list[int], params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> RequestHandle:
        """Submit a prompt's tokens. Whether it is let in is told like everything that becomes of it."""
        self._check_alive()
        params = params or SamplingParams()
        return self.submit(make_request(self.text, ids, params, **options), params)

    def check_room(self, tenant: str, priority: str) -> None:
        """Raise what the engine's queue would tell a request of this tenant and class, by what it has said last and
        what was let through since. Only of those it turned away lately: all others it hears itself.
        """
        told = self._started()[0].verdicts
        if told is not self._verdicts:
            self._verdicts, self._turned_away = told, {(one.tenant, one.kind): one for one in told}
        verdict = self._turned_away.get((tenant, priority))
        if verdict is not None:
            if verdict.num_room < 1:
                raise verdict.refusal.error
            verdict.num_room -= 1

    def submit(self, request: Request, params: SamplingParams, budget: TextBudget | None = None) -> RequestHandle:
        """Submit what `make_request` made of these parameters. `budget` pays for reading its answers on the event loop;
        None: that of this client alone."""
        self._check_alive()
        port, text = self._started()
        reply = Reply(request, params, text.tokenizer, work=budget or self._text_pool.budget)
        asked = RequestHandle(reply, port.cancel, self._forget)
        self._live[request.request_id] = asked
        port.submit(request)
        return asked

    async def explain(
        self, prompt: Prompt, *, tenant: str = DEFAULT_TENANT, cache_group: str | None = None
    ) -> Explanation:
        """How much of a prompt is cached for this tenant, and why the next token is not. Nothing is computed."""
        return await self.explain_ids(
            await self.prompt_ids(prompt, tenant), tenant if cache_group is None else cache_group
        )

    async def explain_ids(self, ids: Sequence[int], cache_group: str) -> Explanation:
        """The same of a prompt's tokens, within a cache group."""
        port, text = self._started()
        if self._failure is not None:
            raise self._failure
        if len(self._questions) >= MAX_EXPLAINS:
            raise CapacityError(
                f"a model explains {MAX_EXPLAINS} prompts at once, {len(self._questions)} are waiting; try again later"
            )
        namespace, question_id = text.info.namespace(cache_group), uuid4().hex
        answer = self._questions[question_id] = asyncio.get_running_loop().create_future()
        port.explain(question_id, namespace, tuple(ids))
        found = await asyncio.shield(answer)
        if isinstance(found, QuireError):
            raise found
        return explanation(text.tokenizer, namespace, ids, found)

    async def chat_ids(
        self, messages: Messages, tenant: str = DEFAULT_TENANT, **arguments: Unpack[TemplateArguments]
    ) -> list[int]:
        """A conversation's tokens, made beside the event loop when it is this tenant's turn."""
        return await self._text_pool.run(checked_name("tenant", tenant), lambda: self.text.chat(messages, **arguments))

    async def prompt_ids(self, prompt: Prompt, tenant: str = DEFAULT_TENANT) -> list[int]:
        """A prompt's tokens, made and checked beside the event loop when it is this tenant's turn."""
        return await self._text_pool.run(checked_name("tenant", tenant), lambda: self.text.prompt(prompt))

    async def _whole(
        self, ids: list[int], params: SamplingParams | None, **options: Unpack[RequestOptions]
    ) -> Completion:
        asked = self.ask(ids, params, **options)
        try:
            async for _ in asked:
                pass
        finally:
            asked.close()
        return asked.completion()

    async def _conversation(
        self, messages: Messages, params: SamplingParams | None, arguments: ChatArguments
    ) -> tuple[list[int], SamplingParams, RequestOptions]:
        """Its tokens and parameters, and what was said of the request beside. Made in the tenant's turn."""
        options = {name: value for name, value in arguments.items() if name in RequestOptions.__annotations__}
        rest: Any = {name: value for name, value in arguments.items() if name not in options}
        tenant = checked_name("tenant", arguments.get("tenant", DEFAULT_TENANT))
        asked = await self._text_pool.run(tenant, lambda: asked_in_python(self.text, messages, params, **rest))
        return *asked, options  # type: ignore[return-value]

    def _check_alive(self) -> None:
        self._started()
        if self._failure is not None:
            raise self._failure

    def _started(self) -> tuple[EnginePort, TextModel]:
        if self._port is None or self._text is None:
            name = type(self).__name__
            raise ConfigError(f"an {name} must be entered first: async with {name}(model) as engine")
        return self._port, self._text

    # -- what a port says, on any thread -------------------------------------------------------------------------------

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
        hand_out(events, self._live, self._cancel_answer)
        if self._questions:
            self._take_answers(events)

    def _take_answers(self, events: Sequence[RequestEvent]) -> None:
        for event in events:
            question = self._questions.get(event.request_id)
            if question is not None and isinstance(event, Explained | Refused):
                del self._questions[event.request_id]
                question.set_result(event.found if isinstance(event, Explained) else event.error)

    def _forget(self, request_id: str) -> None:
        """Nobody waits for it any more."""
        self._live.pop(request_id, None)

    def _cancel_answer(self, request_id: str, index: int) -> None:
        self._started()[0].cancel(request_id, index)

    def _die(self, error: BaseException) -> None:
        self._failure = EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}")
        self._failure.__cause__ = error
        self._end_all(self._failure)

    def _end_all(self, error: QuireError) -> None:
        for asked in self._live.values():
            asked.end(error)
        questions, self._questions = self._questions, {}
        for question in questions.values():
            question.set_result(error)
