"""One of everything that crosses between worker and parent."""

from msgspec.structs import replace

from quire.config import ModelSettings
from quire.core.digests import Namespace
from quire.core.divergence import Divergence, MissReason
from quire.core.events import (
    Admitted,
    Finished,
    FirstToken,
    Preempted,
    PromptLogprobs,
    PromptProgress,
    Queued,
    Refused,
    RequestEvent,
    SequenceFinished,
    Token,
)
from quire.core.inspect.snapshots import (
    BlockFacts,
    CellCounts,
    EngineSnapshot,
    PoolCells,
    RunningFigures,
    StepFigures,
    TreeNode,
    TreePicture,
)
from quire.core.request import Continuation, FinishReason, PriorityClass, Request, ResolvedSampling
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.core.step import TokenLogprobs
from quire.engine import calls, commands
from quire.engine.engine import ModelIdentity, ModelInfo
from quire.errors import EngineDeadError
from quire.worker import messages
from quire.worker.messages import Stepped, WorkerLoad


def assigned(
    kind: type[commands.Submit] | type[commands.Restore], request: Request
) -> commands.Submit | commands.Restore:
    """As a client sends it at second 20 of its clock."""
    return kind.of(replace(request, epoch=7), 20.0)


LOGPROBS = TokenLogprobs(7, -0.25, 1, ((7, -0.25), (9, -2.5)))
REQUEST = Request(
    "a" * 32,
    (1, 2, 3),
    Namespace(1, "model", "", "layout", 32, "group"),
    12.5,
    ResolvedSampling(
        max_tokens=5,
        logit_bias=((3, 1.5),),
        allowed_token_ids=(1, 2),
        stop_token_ids=frozenset({0, 2}),
        logprobs=2,
    ),
    seed=(1 << 63) - 1,
    tenant="someone",
    priority=PriorityClass.LOW,
    continuations=(Continuation(0, (4, 5)), Continuation(2)),
    deadline_s=99.0,
    has_reservation=True,
    grammar="what it may be",
    has_stop_texts=True,
    reports_progress=True,
)
EVENTS: list[RequestEvent] = [
    Queued("a", epoch=1),
    Queued("a", epoch=1 << 40),
    Refused("a", "QueueFullError", (5, 4), epoch=1),
    FirstToken("a", 32, epoch=1),
    FirstToken("a", 0, 32, epoch=1),
    Admitted("a", 1.0, 0.5, 32, epoch=1),
    Admitted("a", 1.0, 0.5, 32, Divergence(32, MissReason.DIVERGED, 33, (5, 6)), epoch=1),
    PromptLogprobs("a", 1, (LOGPROBS,), epoch=1),
    PromptProgress("a", 64, 32, epoch=1),
    Token("a", 1, 7, 3, LOGPROBS, epoch=1),
    Token("a", 0, 7, 3, None, epoch=1),
    Preempted("a", 0, epoch=1),
    SequenceFinished("a", 1, FinishReason.ERROR, 3, "why", epoch=1),
    SequenceFinished("a", 1, FinishReason.ERROR, 3, "why", code="grammar_failed", epoch=1),
    SequenceFinished("a", 0, FinishReason.DISPLACED, 0, None, 7, epoch=1),
    Finished("a", 3, 32, 6, epoch=1),
]
TO_WORKER = [
    messages.Open("model", ModelSettings(memory_bytes=1 << 30), QueueConfig(tenant_weights={"a": 2.0}), bytes(32)),
    assigned(commands.Submit, REQUEST),
    assigned(commands.Restore, replace(REQUEST, deadline_s=None)),
    commands.Cancel("a"),
    calls.EngineCall(1, calls.Explain(REQUEST.namespace, (1, 2, 3))),
    calls.EngineCall(2, calls.GetBlock(7)),
    commands.ClearCache(),
    commands.StartSnapshots(0.4),
    commands.StopSnapshots(),
    commands.Close(),
]
TO_PARENT = [
    messages.LoadProgress("loading", 1, 2),
    messages.Ready(ModelInfo(ModelIdentity("model", "layout"), 32, 100, 49152, 4096, "line", ("note",))),
    messages.Failed("ConfigError", "why"),
    messages.Failed("ConfigError", "why", "port_in_use"),
    Stepped(tuple(EVENTS), WorkerLoad(1, 2, 3, 4, 5, 6, (7, 8))),
    messages.SnapshotMade(
        EngineSnapshot(
            PoolCells(2, 32, 1, b"\x0a\x01", CellCounts(used=1, cached=1)),
            TreePicture((TreeNode(2, -1, 32, 0, 0, "group", 32),), 1, 32),
            (StepFigures(1, 0.5, 3, 1, 1, 2.5),),
            (RunningFigures("a", "someone", "low", "prompt", 2, 3, 3, 0, 0),),
        )
    ),
    calls.CallReply(1, calls.Explained(Divergence(32, MissReason.OTHER_NAMESPACE, other_namespace=REQUEST.namespace))),
    calls.CallReply(1, calls.Explained(Divergence(32, MissReason.EVICTED, evicted_s_ago=1.5))),
    calls.CallReply(
        2, calls.BlockInfo(BlockFacts(7, "used", 1, 0, None, "group", "someone", None, 3, (6, 7), (), ("a",)))
    ),
    calls.CallReply(2, calls.BlockInfo(None)),
    calls.CallReply.of(3, EngineDeadError("gone")),
]
