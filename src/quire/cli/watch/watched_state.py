"""What `quire top` reads of a snapshot: the essentials, as shapes. What is not named here is not even parsed; what a
server leaves out reads as nothing, so that a server of another age can be watched too.
"""

import msgspec

from quire.cli.watch.watch_source import WatchGoneError

MAX_ROWS = 1024
"""Of any list that is kept: a server is not trusted to be short."""


class SeenModel(msgspec.Struct, frozen=True):
    """One that the server has."""

    name: str
    state: str = ""


class SeenCounts(msgspec.Struct, frozen=True):
    """Blocks by state."""

    free: int = 0
    cached: int = 0
    used: int = 0
    shared: int = 0
    pinned: int = 0
    computing: int = 0


class SeenPool(msgspec.Struct, frozen=True):
    """The KV memory."""

    num_blocks: int = 0
    block_size: int = 0
    counts: SeenCounts = SeenCounts()

    @property
    def is_shown(self) -> bool:
        """Whether anything is known of it: while a model loads, all counts are 0."""
        return self.num_blocks > 0 and any(msgspec.structs.astuple(self.counts))


class SeenStep(msgspec.Struct, frozen=True):
    """One step of the engine."""

    step: int
    at_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    rows: int = 0
    ms: float = 0.0


class SeenRunning(msgspec.Struct, frozen=True, rename={"priority": "class"}):
    """A sequence that runs."""

    request_id: str
    tenant: str = ""
    priority: str = ""
    phase: str = ""
    computed: int = 0
    known: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class SeenQueue(msgspec.Struct, frozen=True, rename={"priority": "class"}):
    """Who waits."""

    priority: str = ""
    tenant: str = ""
    num_requests: int = 0


class SeenMisses(msgspec.Struct, frozen=True):
    """What was not found in the cache, for one reason."""

    reason: str = ""
    num_tokens: int = 0
    num_requests: int = 0


class SeenTotals(msgspec.Struct, frozen=True):
    """Since the server began."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_requests: int = 0
    num_preemptions: int = 0


class SeenRates(msgspec.Struct, frozen=True):
    """A few seconds of the last hour."""

    at_s: float
    span_s: float = 0.0
    output_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    ttft_p50_s: float | None = None
    hit_rate: float | None = None


class SeenWorker(msgspec.Struct, frozen=True):
    """One life of a worker."""

    number: int = 0
    state: str = ""
    why: str | None = None


class SeenWarning(msgspec.Struct, frozen=True):
    """A line that makes prefixes unstable, and what it cost."""

    tenant: str = ""
    line: str = ""
    num_lost_tokens: int = 0
    num_requests: int = 0
    kind: str = ""


class SeenEngine(msgspec.Struct, frozen=True):
    """How far the engine is."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    step_s: float = 0.0
    """For how long the step in flight has run."""


class SeenFleet(msgspec.Struct, frozen=True):
    """The members behind a gateway."""

    members: tuple[dict[str, object], ...] = ()
    num_moved: int = 0
    num_quarantined: int = 0
    hit_rate: float | None = None


class SeenSnapshot(msgspec.Struct, frozen=True):
    """One event of the stream."""

    at_s: float
    model: str = ""
    models: tuple[SeenModel, ...] = ()
    pool: SeenPool | None = None
    steps: tuple[SeenStep, ...] = ()
    running: tuple[SeenRunning, ...] = ()
    queue: tuple[SeenQueue, ...] = ()
    misses: tuple[SeenMisses, ...] = ()
    totals: SeenTotals = SeenTotals()
    history: tuple[SeenRates, ...] = ()
    workers: tuple[SeenWorker, ...] = ()
    fleet: SeenFleet | None = None
    engine: SeenEngine | None = None
    warnings: tuple[SeenWarning, ...] = ()


def read_snapshot(data: bytes) -> SeenSnapshot:
    """Raises WatchGoneError for what is none."""
    try:
        return msgspec.json.decode(data, type=SeenSnapshot)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WatchGoneError(f"what the server sends is no snapshot: {error}; is it of this version?") from error
