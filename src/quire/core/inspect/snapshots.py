"""What an engine shows of itself while it is watched: plain structs, the same on the wire to a parent and in JSON.

Ids, counts, cache groups and tenants; never a token id, never a text. Everything in it is bounded.
"""

import msgspec

MAX_CELLS = 32_768
MAX_NODES = 400
MAX_RUNNING_SHOWN = 256
MAX_STEPS_SHOWN = 200
MAX_CHAIN = 4096
"""Blocks of a chain that are named one by one: the nearest."""
MAX_CHILDREN = 256


class CellCounts(msgspec.Struct, frozen=True):
    """Blocks by what becomes of them; the six add up to the pool."""

    free: int = 0
    cached: int = 0
    """No table holds them, and they can be hit."""
    used: int = 0
    """Held by one."""
    shared: int = 0
    """Held by several."""
    pinned: int = 0
    computing: int = 0
    """Written by the step in flight."""


class PoolCells(msgspec.Struct, frozen=True):
    """The pool as a map."""

    num_blocks: int = 0
    block_size: int = 0
    blocks_per_cell: int = 1
    """A power of two. Cell i stands for as many blocks, from block i x blocks_per_cell + 1 on."""
    cells: bytes = b""
    """One byte each: state in the low three bits, the largest reference count, at most 31, in the high five."""
    counts: CellCounts = CellCounts()


class TreeNode(msgspec.Struct, frozen=True):
    """A run of cached blocks without a fork."""

    id: int
    """Its first block."""
    parent: int
    """Where its parent stands in the list, always before it; -1: it begins a prompt."""
    num_tokens: int
    num_references: int
    """Sequences and pins that hold its first block."""
    depth: int
    """How many nodes stand above it."""
    cache_group: str
    num_tokens_below: int
    """Its own and those of all nodes under it, shown or not."""


class TreePicture(msgspec.Struct, frozen=True):
    """The prefix tree: its nodes that are in use, then the largest."""

    nodes: tuple[TreeNode, ...] = ()
    num_nodes: int = 0
    """How many there are, those that are not shown among them."""
    num_tokens: int = 0
    """Of all of them."""
    is_drawn: bool = False
    """Else the tree was not drawn yet: what is cached is not shown."""


class StepFigures(msgspec.Struct, frozen=True):
    """One step."""

    step: int
    age_s: float
    """How long before the snapshot it ended."""
    prompt_tokens: int
    output_tokens: int
    rows: int
    ms: float


class RunningFigures(msgspec.Struct, frozen=True, rename={"priority": "class"}):
    """One sequence that runs."""

    request_id: str
    tenant: str
    priority: str
    phase: str
    """`prompt` or `answer`."""
    computed: int
    known: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class EngineSnapshot(msgspec.Struct, frozen=True):
    """An engine at one moment."""

    pool: PoolCells
    tree: TreePicture
    steps: tuple[StepFigures, ...]
    """Those since the snapshot before, the latest of them."""
    running: tuple[RunningFigures, ...]
    """The most urgent first."""


class BlockFacts(msgspec.Struct, frozen=True):
    """One block."""

    block_id: int
    state: str
    """A name of `CellCounts`."""
    ref_count: int
    pin_count: int
    digest: str | None
    """None: it has no name, and cannot be hit."""
    cache_group: str | None
    tenant: str | None
    """Of a request that holds it."""
    age_s: float | None
    """Since it got its name."""
    num_tokens: int
    """That are computed in it."""
    chain: tuple[int, ...]
    """The blocks from the beginning of its prompt to it."""
    children: tuple[int, ...]
    """The blocks that follow it, the newest first."""
    requests: tuple[str, ...]
    """Those that hold it."""
