"""The parts (`Watched...`) of a server's snapshot that `quire top` reads. Unknown fields are ignored and missing fields
have defaults, so that servers of other versions can be watched too.
"""

import msgspec

from quire.cli.watch.watch_source import WatchError
from quire.core.inspect.snapshots import PoolCells, RunningFigures

MAX_ROWS = 1024
"""Maximum number of printed items of each list, because the server is not trusted."""


class WatchedModel(msgspec.Struct, frozen=True):
    """One model of the server."""

    name: str
    state: str = ""


class WatchedStep(msgspec.Struct, frozen=True):
    """One step of the engine."""

    at_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    ms: float = 0.0


class WatchedQueue(msgspec.Struct, frozen=True, rename={"priority": "class"}):
    """Number of waiting requests of one tenant and priority class."""

    priority: str = ""
    tenant: str = ""
    num_requests: int = 0


class WatchedMisses(msgspec.Struct, frozen=True):
    """Cache misses for one reason."""

    reason: str = ""
    num_tokens: int = 0
    num_requests: int = 0


class WatchedTotals(msgspec.Struct, frozen=True):
    """Counters since the server started."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_requests: int = 0
    num_preemptions: int = 0


class WatchedRates(msgspec.Struct, frozen=True):
    """Rates over one interval of a few seconds in the last hour."""

    at_s: float
    output_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    ttft_p50_s: float | None = None
    hit_rate: float | None = None


class WatchedWorker(msgspec.Struct, frozen=True):
    """One worker process."""

    number: int = 0
    state: str = ""
    why: str | None = None


class WatchedWarning(msgspec.Struct, frozen=True):
    """A prompt line that varies between requests, and the prompt tokens that were recomputed because of it."""

    tenant: str = ""
    line: str = ""
    num_lost_tokens: int = 0
    num_requests: int = 0
    kind: str = ""


class WatchedEngine(msgspec.Struct, frozen=True):
    """Progress counters of the engine."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    step_s: float = 0.0
    """Duration of the current step so far."""


class WatchedFleet(msgspec.Struct, frozen=True):
    """The members of a gateway."""

    members: tuple[dict[str, object], ...] = ()
    num_moved: int = 0
    num_quarantined: int = 0
    hit_rate: float | None = None


class WatchedSnapshot(msgspec.Struct, frozen=True):
    """One snapshot event of the watch stream."""

    at_s: float
    model: str = ""
    models: tuple[WatchedModel, ...] = ()
    pool: PoolCells | None = None
    steps: tuple[WatchedStep, ...] = ()
    running: tuple[RunningFigures, ...] = ()
    queue: tuple[WatchedQueue, ...] = ()
    misses: tuple[WatchedMisses, ...] = ()
    totals: WatchedTotals = WatchedTotals()
    history: tuple[WatchedRates, ...] = ()
    workers: tuple[WatchedWorker, ...] = ()
    fleet: WatchedFleet | None = None
    engine: WatchedEngine | None = None
    warnings: tuple[WatchedWarning, ...] = ()

    @property
    def shown_pool(self) -> PoolCells | None:
        """The block pool; None while the model loads, because its counts are then missing or all 0."""
        pool = self.pool
        return pool if pool is not None and pool.num_blocks and any(msgspec.structs.astuple(pool.counts)) else None


def read_snapshot(data: bytes) -> WatchedSnapshot:
    """Parse a snapshot. Raises WatchError for a malformed snapshot."""
    try:
        return msgspec.json.decode(data, type=WatchedSnapshot)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WatchError(f"malformed snapshot: {error}; check that the server runs this version of quire") from error
