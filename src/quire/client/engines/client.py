"""Many callers on one event loop, one model: each awaits its own answer. Where the model runs is behind a port.

    generate · chat · stream ─► request ─► port (a thread that steps, or a supervised worker)
             pieces ◄─ reply ◄─ events ◄─┘

Every outcome of a request comes as its events, a refusal too. A port may emit them on any thread; they are handled on
the event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire.client.prefix.explanation import Explanation, explanation
from quire.client.reply.live_replies import hand_out
from quire.client.reply.outputs import Completion, Piece
from quire.client.reply.reply import Reply
from quire.client.reply.stream import RequestHandle
from quire.client.request.conversation import chat_inputs
from quire.client.request.params import SamplingParams
from quire.client.request.requests import DEFAULT_TENANT, RequestOptions, checked_name, checked_options, make_request
from quire.client.request.text_model import Messages, TextModel
from quire.client.request.text_pool import TextPool
from quire.core.events import RequestEvent
from quire.core.inspect.snapshots import BlockFacts, EngineSnapshot
from quire.core.request import Request
from quire.core.scheduling.shares import AdmissionHint
from quire.core.work_budget import WorkSpent
from quire.engine.calls import BlockInfo, CallOp, CallResult, Explain, Explained, GetBlock
from quire.engine.port import EnginePort, WorkerRecord
from quire.errors import CapacityError, ConfigError, EngineDeadError, InvariantError, QuireError
from quire.text.text_work import TextBudget

Prompt = str | Sequence[int]
CallOutcome = TypeVar("CallOutcome", bound=CallResult)
MAX_CALLS = 16
"""Calls of one kind to one model under way at once: each delays its steps for a moment."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of an engine, as far as this process receives them."""

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
    """Made for watchers."""
    step_s: float = 0.0
    """For how long the step in flight has run."""
    work: WorkSpent = field(default_factory=WorkSpent)
    """On grammars in the worker, or of members in a gateway."""


@dataclass(frozen=True, slots=True)
class FleetMemberStats:
    """A member of a fleet, as its gateway sees it."""

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
    """Members with the same one give the same bits; empty: unknown."""


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
    """That send heartbeats to the members, this one among them."""


class EngineClient:
    """A model, for any number of tasks on one event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port: EnginePort | None = None
        self._text: TextModel | None = None
        self._live: dict[str, RequestHandle] = {}
        self._text_pool = TextPool()
        self._failure: QuireError | None = None
        self._verdicts: Sequence[AdmissionHint] = ()
        self._refused_lately: dict[tuple[str, str], AdmissionHint] = {}
        """The same by tenant and class, less what was let through since."""
        self._calls: dict[asyncio.Future[CallResult | QuireError], type[CallOp]] = {}
        """Calls without a reply, whether or not their callers still wait."""

    @property
    def text(self) -> TextModel:
        """The text side of the model: tokenizer, template, end tokens; and its limits."""
        return self._started()[1]

    @property
    def is_ready(self) -> bool:
        return self.is_alive

    @property
    def is_busy(self) -> bool:
        """It is ready, and its step in flight is a long one."""
        return False

    def stats(self) -> EngineStats | None:
        """Counters of its engine; None if it reports none."""
        return None

    @property
    def num_gateways(self) -> int:
        """Servers that send to the same engines; 1 without a fleet."""
        return 1

    def fleet_stats(self) -> FleetStats | None:
        """Of the members that compute it; None: it is computed by this server."""
        return None

    def clear_cache(self) -> None:
        """Forget every cached block that no request uses."""
        self._started()[0].clear_cache()

    async def set_aside(self) -> None:
        """Free the memory that it computes in. Its requests wait; its tokenizer stays."""
        raise InvariantError(f"{type(self).__name__} runs in this process and cannot be set aside")

    async def go_on(self) -> None:
        """Load it again; what was set aside continues."""
        raise InvariantError(f"{type(self).__name__} was never set aside")

    @property
    def workers(self) -> Sequence[WorkerRecord]:
        """Of its workers, if it has any: the oldest first."""
        return self._started()[0].watching.workers

    def watch(self, show: Callable[[EngineSnapshot], None], period_s: float) -> None:
        """Show a snapshot so often, until `unwatch`; one or two may come after that."""
        self._started()[0].watching.watch(lambda snapshot: self._on_loop(show, snapshot), period_s)

    def unwatch(self) -> None:
        """Stop the snapshots."""
        self._started()[0].watching.unwatch()

    async def block(self, block_id: int) -> BlockFacts | None:
        """Facts of a block; None: there is no such block. Raises CapacityError, or the engine's error."""
        return (await self._call(GetBlock(block_id), BlockInfo)).facts

    @property
    def num_open(self) -> int:
        """Requests that have not had their last event and whose callers wait for it."""
        return len(self._live)

    @property
    def is_alive(self) -> bool:
        """It was entered and has not failed."""
        return self._port is not None and self._failure is None

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """The whole answer to a prompt. `options` are those of `RequestOptions`."""
        return await self._whole(await self.prompt_ids(prompt, options.get("tenant", DEFAULT_TENANT)), params, options)

    async def chat(self, messages: Messages, params: SamplingParams | None = None, **arguments: Any) -> Completion:
        """The whole answer to a conversation. `arguments` are those of `ConversationArguments` and `RequestOptions`."""
        ids, params, options = await self._conversation(messages, params, arguments)
        return await self._whole(ids, params, options)

    async def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **arguments: Any
    ) -> AsyncIterator[Piece]:
        """The answer to a conversation piece by piece; `arguments` as for `chat`."""
        ids, params, options = await self._conversation(messages, params, arguments)
        async for piece in self.stream(ids, params, **options):
            yield piece

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Piece]:
        """The answer piece by piece. Leaving the loop early ends the request."""
        ids = await self.prompt_ids(prompt, options.get("tenant", DEFAULT_TENANT))
        handle = self.submit_ids(ids, params, **options)
        try:
            async for piece in handle:
                yield piece
        finally:
            handle.close()

    def submit_ids(self, ids: list[int], params: SamplingParams | None = None, **options: Any) -> RequestHandle:
        """Submit a prompt's tokens. A refusal comes as an event, like every other outcome."""
        self._check_alive()
        params = params or SamplingParams()
        return self.submit(make_request(self.text, ids, params, checked_options(options)), params)

    def reserve_room(self, tenant: str, priority: str) -> None:
        """Raise the error with which the engine's queue would refuse a request of this tenant and class, by its last
        hints and what was let through since. Only for tenants it refused lately: on all others it decides itself.
        """
        hints = self._started()[0].verdicts
        if hints is not self._verdicts:
            self._verdicts, self._refused_lately = hints, {(one.tenant, one.kind): one for one in hints}
        verdict = self._refused_lately.get((tenant, priority))
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
        handle = RequestHandle(reply, port.cancel, self._forget)
        self._live[request.request_id] = handle
        port.submit(request)
        return handle

    async def explain(
        self, prompt: Prompt, *, tenant: str = DEFAULT_TENANT, cache_group: str | None = None
    ) -> Explanation:
        """How much of a prompt is cached for this tenant, and why the next token is not. Nothing is computed."""
        return await self.explain_ids(
            await self.prompt_ids(prompt, tenant), tenant if cache_group is None else cache_group
        )

    async def explain_ids(self, ids: Sequence[int], cache_group: str) -> Explanation:
        """The same of a prompt's tokens, within a cache group."""
        namespace = self.text.info.namespace(cache_group)
        explained = await self._call(Explain(namespace, tuple(ids)), Explained)
        return explanation(self.text.tokenizer, namespace, ids, explained.found)

    async def _call(self, op: CallOp, kind: type[CallOutcome]) -> CallOutcome:
        self._check_alive()
        num_waiting = list(self._calls.values()).count(type(op))
        if num_waiting >= MAX_CALLS:
            raise CapacityError(
                f"expected at most {MAX_CALLS} {type(op).__name__} queries of a model at once, {num_waiting} are "
                "waiting; try again later",
                code="too_many_queries",
            )
        reply: asyncio.Future[CallResult | QuireError] = asyncio.get_running_loop().create_future()
        self._calls[reply] = type(op)
        reply.add_done_callback(self._calls.pop)
        self._started()[0].call(op, lambda result: self._on_loop(reply.set_result, result))
        result = await asyncio.shield(reply)
        if isinstance(result, QuireError):
            raise result
        if not isinstance(result, kind):
            raise InvariantError(f"expected {kind.__name__} as the result of a call, got {type(result).__name__}")
        return result

    async def prompt_ids(self, prompt: Prompt, tenant: str = DEFAULT_TENANT) -> list[int]:
        """A prompt's tokens, made and checked beside the event loop when it is this tenant's turn."""
        return await self._text_pool.run(checked_name("tenant", tenant), lambda: self.text.prompt(prompt))

    async def _whole(self, ids: list[int], params: SamplingParams | None, options: Mapping[str, Any]) -> Completion:
        handle = self.submit_ids(ids, params, **options)
        try:
            async for _ in handle:
                pass
        finally:
            handle.close()
        return handle.completion()

    async def _conversation(
        self, messages: Messages, params: SamplingParams | None, arguments: dict[str, Any]
    ) -> tuple[list[int], SamplingParams, dict[str, Any]]:
        """Its tokens and parameters, and the options of its request. Made in the tenant's turn."""
        options = {name: arguments.pop(name) for name in RequestOptions.__struct_fields__ if name in arguments}
        tenant = checked_name("tenant", options.get("tenant", DEFAULT_TENANT))
        inputs = await self._text_pool.run(tenant, lambda: chat_inputs(self.text, messages, params, **arguments))
        return *inputs, options

    def _check_alive(self) -> None:
        self._started()
        if self._failure is not None:
            raise self._failure

    def _started(self) -> tuple[EnginePort, TextModel]:
        if self._port is None or self._text is None:
            name = type(self).__name__
            sentence = f"expected {name} to be entered first: async with {name}(model) as engine"
            raise ConfigError(sentence, code="engine_not_entered")
        return self._port, self._text

    # -- what a port emits, on any thread ------------------------------------------------------------------------------

    def _on_events(self, events: Sequence[RequestEvent]) -> None:
        self._on_loop(self._dispatch, events)

    def _on_failure(self, error: BaseException) -> None:
        self._on_loop(self._die, error)

    def _on_loop(self, call: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None:
            # A loop that was closed under a running engine takes no more calls.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call, *arguments)

    # -- on the event loop ---------------------------------------------------------------------------------------------

    def _dispatch(self, events: Sequence[RequestEvent]) -> None:
        hand_out(events, self._live, self._cancel_answer)

    def _forget(self, request_id: str) -> None:
        """Its caller does not wait for it any more."""
        self._live.pop(request_id, None)

    def _cancel_answer(self, request_id: str, index: int) -> None:
        self._started()[0].cancel(request_id, index)

    def _die(self, error: BaseException) -> None:
        self._failure = EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}")
        self._failure.__cause__ = error
        self._end_all(self._failure)

    def _end_all(self, error: QuireError) -> None:
        for handle in self._live.values():
            handle.end(error)
