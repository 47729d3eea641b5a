"""Snapshots of an engine for the dashboard: plain structs, both between processes and as JSON.

They contain ids, counts, cache groups and tenants, but no token ids and no text. All sizes are bounded.
"""

import msgspec

MAX_CELLS = 32_768  # of the pool map
MAX_NODES = 400  # of the tree map
MAX_RUNNING_SHOWN = 256
MAX_STEPS_SHOWN = 200
MAX_CHAIN = 4096
"""Maximum length of `BlockFacts.chain`: a block and its nearest ancestors."""
MAX_CHILDREN = 256  # in `BlockFacts.children`


class CellCounts(msgspec.Struct, frozen=True):
    """Number of blocks in each state; the sum is the pool size."""

    free: int = 0
    cached: int = 0
    """Unreferenced blocks that can be hit."""
    used: int = 0
    """Blocks with one reference."""
    shared: int = 0
    """Blocks with several references."""
    pinned: int = 0
    computing: int = 0
    """Blocks that the step in flight writes."""


class PoolCells(msgspec.Struct, frozen=True):
    """The pool as a map."""

    num_blocks: int = 0
    block_size: int = 0
    blocks_per_cell: int = 1
    """A power of two. Cell i covers this many blocks, starting with block i * blocks_per_cell + 1."""
    cells: bytes = b""
    """One byte per cell: the state in the low 3 bits, the largest reference count (at most 31) in the high 5 bits."""
    counts: CellCounts = CellCounts()


class TreeNode(msgspec.Struct, frozen=True):
    """A run of cached blocks without a fork."""

    id: int
    """The node's first block."""
    parent: int
    """Index of the parent in `TreePicture.nodes`, always smaller than the index of this node; -1: starts a prompt."""
    num_tokens: int
    num_references: int
    """Number of sequences and pins that reference the node's first block."""
    depth: int
    """Number of ancestors."""
    cache_group: str
    num_tokens_below: int
    """Tokens of the node and of all its descendants, shown or not."""


class TreePicture(msgspec.Struct, frozen=True):
    """The most important nodes of the prefix tree: the most referenced, then the largest. Parents come first."""

    nodes: tuple[TreeNode, ...] = ()
    num_nodes: int = 0
    """Number of all nodes, shown or not."""
    num_tokens: int = 0
    """Tokens of all nodes, shown or not."""
    is_drawn: bool = False
    """False until the tree has been walked for the first time."""


class StepFigures(msgspec.Struct, frozen=True):
    """Metrics of one step."""

    step: int
    age_s: float
    """Time from the end of the step to the snapshot."""
    prompt_tokens: int
    output_tokens: int
    rows: int
    ms: float  # duration


class RunningFigures(msgspec.Struct, frozen=True, rename={"priority": "class"}):
    """Metrics of one running sequence."""

    request_id: str
    tenant: str
    priority: str
    phase: str
    """`prompt` (prefill) or `answer` (decoding)."""
    computed: int  # tokens
    known: int  # tokens, computed or not
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class EngineSnapshot(msgspec.Struct, frozen=True):
    """The state of an engine at one time."""

    pool: PoolCells
    tree: TreePicture
    steps: tuple[StepFigures, ...]
    """The latest steps, at most since the previous snapshot."""
    running: tuple[RunningFigures, ...]
    """Running sequences, most urgent first."""


class BlockFacts(msgspec.Struct, frozen=True):
    """Details of one block."""

    block_id: int
    state: str
    """One of the field names of `CellCounts`."""
    ref_count: int
    pin_count: int
    digest: str | None
    """None: the block is not in the prefix tree and cannot be hit."""
    cache_group: str | None
    tenant: str | None
    """The tenant of a running request that uses the block."""
    age_s: float | None
    """Time since the block was added to the prefix tree."""
    num_tokens: int
    """Number of computed tokens in the block."""
    chain: tuple[int, ...]
    """The blocks from the start of the prompt to this block."""
    children: tuple[int, ...]
    """The child blocks in the prefix tree, newest first."""
    requests: tuple[str, ...]
    """The running requests that use the block."""
