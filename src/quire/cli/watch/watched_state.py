"""The parts (`Seen...`) of a server's snapshot that `quire top` reads. Unknown fields are ignored and missing fields
have defaults, so that servers of other versions can be watched too.
"""

import msgspec

from quire.cli.watch.watch_source import WatchGoneError
from quire.core.inspect.snapshots import PoolCells, RunningFigures

MAX_ROWS = 1024
"""Maximum number of printed items of each list, because the server is not trusted."""


class SeenModel(msgspec.Struct, frozen=True):
    """One model of the server."""

    name: str
    state: str = ""


class SeenStep(msgspec.Struct, frozen=True):
    """One step of the engine."""

    at_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    ms: float = 0.0


class SeenQueue(msgspec.Struct, frozen=True, rename={"priority": "class"}):
    """Number of waiting requests of one tenant and priority class."""

    priority: str = ""
    tenant: str = ""
    num_requests: int = 0


class SeenMisses(msgspec.Struct, frozen=True):
    """Cache misses for one reason."""

    reason: str = ""
    num_tokens: int = 0
    num_requests: int = 0


class SeenTotals(msgspec.Struct, frozen=True):
    """Counters since the server started."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_requests: int = 0
    num_preemptions: int = 0


class SeenRates(msgspec.Struct, frozen=True):
    """Rates over one interval of a few seconds in the last hour."""

    at_s: float
    output_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    ttft_p50_s: float | None = None
    hit_rate: float | None = None


class SeenWorker(msgspec.Struct, frozen=True):
    """One worker process."""

    number: int = 0
    state: str = ""
    why: str | None = None


class SeenWarning(msgspec.Struct, frozen=True):
    """A prompt line that varies between requests and so invalidates cached prefixes, and the tokens lost by that."""

    tenant: str = ""
    line: str = ""
    num_lost_tokens: int = 0
    num_requests: int = 0
    kind: str = ""


class SeenEngine(msgspec.Struct, frozen=True):
    """Progress counters of the engine."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    step_s: float = 0.0
    """Duration of the current step so far."""


class SeenFleet(msgspec.Struct, frozen=True):
    """The members of a gateway."""

    members: tuple[dict[str, object], ...] = ()
    num_moved: int = 0
    num_quarantined: int = 0
    hit_rate: float | None = None


class SeenSnapshot(msgspec.Struct, frozen=True):
    """One snapshot event of the watch stream."""

    at_s: float
    model: str = ""
    models: tuple[SeenModel, ...] = ()
    pool: PoolCells | None = None
    steps: tuple[SeenStep, ...] = ()
    running: tuple[RunningFigures, ...] = ()
    queue: tuple[SeenQueue, ...] = ()
    misses: tuple[SeenMisses, ...] = ()
    totals: SeenTotals = SeenTotals()
    history: tuple[SeenRates, ...] = ()
    workers: tuple[SeenWorker, ...] = ()
    fleet: SeenFleet | None = None
    engine: SeenEngine | None = None
    warnings: tuple[SeenWarning, ...] = ()

    @property
    def shown_pool(self) -> PoolCells | None:
        """The block pool; None while the model loads, because its counts are then missing or all 0."""
        pool = self.pool
        return pool if pool is not None and pool.num_blocks and any(msgspec.structs.astuple(pool.counts)) else None


def read_snapshot(data: bytes) -> SeenSnapshot:
    """Parse a snapshot. Raises WatchGoneError for a malformed snapshot."""
    try:
        return msgspec.json.decode(data, type=SeenSnapshot)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WatchGoneError(f"malformed snapshot: {error}; does the server have this version of quire?") from error
