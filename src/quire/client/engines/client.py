"""The client of one model, for many callers on one event loop. An `EnginePort` hides where the model runs.

    generate · chat · stream ─► request ─► port (engine thread, supervised worker, or fleet)
             pieces ◄─ reply ◄─ events ◄─┘

Every outcome of a request arrives as events, including refusals. A port may emit events on any thread; they are handled
on the event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quire.client.prefix.explanation import Explanation, explanation
from quire.client.reply.outputs import Completion, Piece
from quire.client.reply.reply import Reply, dispatch_events
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
"""Maximum concurrent calls (queries such as `Explain`) of one kind to one model; each slightly delays the engine."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges of an engine, as last reported to this process."""

    num_blocks: int = 0
    block_size: int = 0
    kv_usage: float = 0.0
    """Share of blocks in use, 0 to 1."""
    num_preemptions: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_restarts: int = 0
    step_sizes: tuple[tuple[str, int], ...] = ()
    """A cumulative histogram: pairs of an upper bound in tokens and the number of steps of at most that size."""
    num_step_tokens: int = 0
    num_draft_tokens: int = 0
    """Draft tokens that steps verified."""
    num_accepted_tokens: int = 0
    """Draft tokens that were accepted."""
    num_forced_tokens: int = 0
    """Output tokens that were not sampled, because a grammar allowed only one token."""
    grammar_compile_s: float = 0.0
    grammar_mask_s: float = 0.0
    """CPU time for computing token masks of grammars."""
    num_pins_yielded: int = 0
    """Pins that lost blocks before their end."""
    num_snapshots: int = 0
    """Snapshots of the engine's state, created for `watch`."""
    step_s: float = 0.0
    """Elapsed time of the step in flight."""
    work: WorkSpent = field(default_factory=WorkSpent)
    """CPU time spent on grammars (in a worker) or on data from members (in a gateway)."""


@dataclass(frozen=True, slots=True)
class FleetMemberStats:
    """A member of a fleet, as its gateway sees it."""

    address: str
    state: str
    """The member's state in the router; only a `ready` member gets requests."""
    num_requests: int
    """Requests of this gateway that are assigned to the member now."""
    num_tokens_in_flight: int
    """Prompt tokens of all gateways that the member has not computed yet."""
    num_blocks: int
    kv_usage: float
    """Share of blocks in use, 0 to 1."""
    exactness: str
    """Fingerprint of the numerics: members with equal fingerprints compute bitwise equal output. Empty: unknown."""


@dataclass(frozen=True, slots=True)
class FleetStats:
    """State of the fleet that computes a model, as its gateway sees it."""

    members: tuple[FleetMemberStats, ...]
    num_moved: int
    """Requests that were resumed on another member."""
    num_moved_inexact: int
    """Requests resumed on a member with different numerics, whose output may differ."""
    num_quarantined: int
    num_held: int
    """Requests that are not assigned to any member now."""
    num_gateways: int
    """Gateways that send heartbeats to the members, including this one."""


class EngineClient:
    """The client of one model, used by any number of tasks on one event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port: EnginePort | None = None
        self._text: TextModel | None = None
        self._open_requests: dict[str, RequestHandle] = {}
        self._text_pool = TextPool()
        self._failure: QuireError | None = None
        self._hints: Sequence[AdmissionHint] = ()
        self._hint_by_class: dict[tuple[str, str], AdmissionHint] = {}
        """`_hints` by tenant and class. Each request admitted since the report reduces the remaining `num_room`."""
        self._calls: dict[asyncio.Future[CallResult | QuireError], type[CallOp]] = {}
        """Calls without a result yet, including those whose callers were cancelled."""

    @property
    def text(self) -> TextModel:
        """The text model: tokenizer, template, EOS tokens and limits."""
        return self._port_and_text()[1]

    @property
    def is_ready(self) -> bool:
        return self.is_alive

    @property
    def is_busy(self) -> bool:
        """Whether the model is ready and its step in flight has run for a long time."""
        return False

    def stats(self) -> EngineStats | None:
        """Return the engine's counters; None if it does not report any."""
        return None

    @property
    def num_gateways(self) -> int:
        """Number of gateways that send requests to the same engines; 1 without a fleet."""
        return 1

    def fleet_stats(self) -> FleetStats | None:
        """Return the state of the fleet that computes the model; None if this server computes it."""
        return None

    def clear_cache(self) -> None:
        """Evict all cached blocks that no request uses."""
        self._port_and_text()[0].clear_cache()

    async def suspend(self) -> None:
        """Unload the model to free its memory. Open requests wait; the tokenizer stays loaded."""
        raise InvariantError(f"expected a model in a worker process to suspend, got {type(self).__name__}")

    async def resume(self) -> None:
        """Load the model again and resume the requests that waited."""
        raise InvariantError(f"expected a suspended model to resume, got {type(self).__name__}")

    @property
    def workers(self) -> Sequence[WorkerRecord]:
        """Records of the model's worker processes, oldest first; empty without workers."""
        return self._port_and_text()[0].watching.workers

    def watch(self, show: Callable[[EngineSnapshot], None], period_s: float) -> None:
        """Call `show` with a snapshot every `period_s` until `unwatch`; one or two snapshots may arrive after that."""
        self._port_and_text()[0].watching.watch(lambda snapshot: self._call_on_loop(show, snapshot), period_s)

    def unwatch(self) -> None:
        """Stop the snapshots."""
        self._port_and_text()[0].watching.unwatch()

    async def block(self, block_id: int) -> BlockFacts | None:
        """Return the facts of a block; None if it does not exist. Raises CapacityError, or the engine's error."""
        return (await self._call(GetBlock(block_id), BlockInfo)).facts

    @property
    def num_open(self) -> int:
        """Number of requests whose last event has not arrived and whose callers still wait."""
        return len(self._open_requests)

    @property
    def is_alive(self) -> bool:
        """Whether the engine has been started and has not failed."""
        return self._port is not None and self._failure is None

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """Return the complete answer to a prompt. `options` are the fields of `RequestOptions`."""
        return await self._answer(await self.prompt_ids(prompt, options.get("tenant", DEFAULT_TENANT)), params, options)

    async def chat(self, messages: Messages, params: SamplingParams | None = None, **arguments: Any) -> Completion:
        """Complete a conversation. `arguments` are the fields of `ConversationArguments` and `RequestOptions`."""
        ids, params, options = await self._conversation(messages, params, arguments)
        return await self._answer(ids, params, options)

    async def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **arguments: Any
    ) -> AsyncIterator[Piece]:
        """Yield the answer to a conversation in pieces; `arguments` as for `chat`."""
        ids, params, options = await self._conversation(messages, params, arguments)
        async for piece in self.stream(ids, params, **options):
            yield piece

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Piece]:
        """Yield the answer to a prompt in pieces. Leaving the loop early cancels the request."""
        ids = await self.prompt_ids(prompt, options.get("tenant", DEFAULT_TENANT))
        handle = self.submit_ids(ids, params, **options)
        try:
            async for piece in handle:
                yield piece
        finally:
            handle.close()

    def submit_ids(self, ids: list[int], params: SamplingParams | None = None, **options: Any) -> RequestHandle:
        """Submit a prompt's token ids. A refusal arrives as an event, like every other outcome."""
        self._check_alive()
        params = params or SamplingParams()
        return self.submit(make_request(self.text, ids, params, checked_options(options)), params)

    def reserve_room(self, tenant: str, priority: str) -> None:
        """Raise the error with which the engine's queue would refuse a request of this tenant and class. Otherwise
        count the request as admitted. Predicted from the engine's last hints; a class without a hint is not refused.
        """
        hints = self._port_and_text()[0].admission_hints
        if hints is not self._hints:
            self._hints, self._hint_by_class = hints, {(hint.tenant, hint.kind): hint for hint in hints}
        hint = self._hint_by_class.get((tenant, priority))
        if hint is not None:
            if hint.num_room < 1:
                raise hint.refusal.error
            hint.num_room -= 1

    def submit(self, request: Request, params: SamplingParams, budget: TextBudget | None = None) -> RequestHandle:
        """Submit a request from `make_request`. `budget` limits the CPU time for parsing its answers on the event loop;
        None: the budget of this client."""
        self._check_alive()
        port, text = self._port_and_text()
        reply = Reply(request, params, text.tokenizer, work=budget or self._text_pool.budget)
        handle = RequestHandle(reply, port.cancel, self._forget)
        self._open_requests[request.request_id] = handle
        port.submit(request)
        return handle

    async def explain(
        self, prompt: Prompt, *, tenant: str = DEFAULT_TENANT, cache_group: str | None = None
    ) -> Explanation:
        """Return how much of a prompt is cached for this tenant, and why the rest is not. The model does not run."""
        return await self.explain_ids(
            await self.prompt_ids(prompt, tenant), tenant if cache_group is None else cache_group
        )

    async def explain_ids(self, ids: Sequence[int], cache_group: str) -> Explanation:
        """Return how much of these token ids is cached for a cache group, and why the rest is not."""
        namespace = self.text.info.namespace(cache_group)
        explained = await self._call(Explain(namespace, tuple(ids)), Explained)
        return explanation(self.text.tokenizer, namespace, ids, explained.divergence)

    async def _call(self, op: CallOp, expected: type[CallOutcome]) -> CallOutcome:
        self._check_alive()
        num_waiting = list(self._calls.values()).count(type(op))
        if num_waiting >= MAX_CALLS:
            raise CapacityError(
                f"expected at most {MAX_CALLS} concurrent {type(op).__name__} queries of a model, already "
                f"{num_waiting} are running; try again later",
                code="too_many_queries",
            )
        future: asyncio.Future[CallResult | QuireError] = asyncio.get_running_loop().create_future()
        self._calls[future] = type(op)
        future.add_done_callback(self._calls.pop)
        self._port_and_text()[0].call(op, lambda result: self._call_on_loop(future.set_result, result))
        result = await asyncio.shield(future)
        if isinstance(result, QuireError):
            raise result
        if not isinstance(result, expected):
            raise InvariantError(f"expected {expected.__name__} as the result of a call, got {type(result).__name__}")
        return result

    async def prompt_ids(self, prompt: Prompt, tenant: str = DEFAULT_TENANT) -> list[int]:
        """Return a prompt's token ids. A thread of the text pool tokenizes and checks it in this tenant's turn."""
        return await self._text_pool.run(checked_name("tenant", tenant), lambda: self.text.prompt(prompt))

    async def _answer(self, ids: list[int], params: SamplingParams | None, options: Mapping[str, Any]) -> Completion:
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
        """Return token ids, sampling parameters and request options, computed in a thread in the tenant's turn."""
        options = {name: arguments.pop(name) for name in RequestOptions.__struct_fields__ if name in arguments}
        tenant = checked_name("tenant", options.get("tenant", DEFAULT_TENANT))
        inputs = await self._text_pool.run(tenant, lambda: chat_inputs(self.text, messages, params, **arguments))
        return *inputs, options

    def _check_alive(self) -> None:
        self._port_and_text()
        if self._failure is not None:
            raise self._failure

    def _port_and_text(self) -> tuple[EnginePort, TextModel]:
        if self._port is None or self._text is None:
            name = type(self).__name__
            message = f"expected {name} to be entered first: async with {name}(model) as engine"
            raise ConfigError(message, code="engine_not_entered")
        return self._port, self._text

    # -- callbacks of the port, on any thread --------------------------------------------------------------------------

    def _on_events(self, events: Sequence[RequestEvent]) -> None:
        self._call_on_loop(self._dispatch, events)

    def _on_failure(self, error: BaseException) -> None:
        self._call_on_loop(self._fail, error)

    def _call_on_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None:
            # If the loop was closed while the engine was running, the call is dropped.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback, *arguments)

    # -- on the event loop ---------------------------------------------------------------------------------------------

    def _dispatch(self, events: Sequence[RequestEvent]) -> None:
        dispatch_events(events, self._open_requests, self._cancel_answer)

    def _forget(self, request_id: str) -> None:
        """Remove a request whose caller no longer waits."""
        self._open_requests.pop(request_id, None)

    def _cancel_answer(self, request_id: str, index: int) -> None:
        self._port_and_text()[0].cancel(request_id, index)

    def _fail(self, error: BaseException) -> None:
        self._failure = EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}")
        self._failure.__cause__ = error
        self._end_all(self._failure)

    def _end_all(self, error: QuireError) -> None:
        for handle in self._open_requests.values():
            handle.end(error)
