"""The contract between the core and a backend's runner, which executes step plans and stores KV and recurrent states.

One step is in flight at a time, and the core plans nothing while a step runs (ADR 0029). `start` and `wait` are
separate calls so that grammar masks can be computed while the step runs; `wait` receives them. A runner may begin the
computation in `start` or do all of it in `wait`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from quire.core.step import NO_MASKS, Masks, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of a runner, fixed when the model is loaded."""

    num_blocks: int
    """Allocatable blocks, with ids from 1 to this number. Block 0, the null block, exists in addition and stores no KV.
    """
    block_size: int
    max_sequence_tokens: int
    max_step_tokens: int
    """Maximum tokens fed by one step, over all its items."""
    vocabulary_size: int
    num_kv_bytes: int
    """Size of one block in bytes, in the layout of `read_blocks`."""
    num_slots: int = 0
    """Allocatable slots for recurrent state, with ids from 1 to this number; 0 for a model without recurrent layers.
    Slot 0 exists in addition: it is the state before the first token and is never written."""


class PendingStep(Protocol):
    """A started step whose result has not been fetched."""

    def wait(self, masks: Masks = NO_MASKS) -> StepResult:
        """Block until the step is done, and return its result. Tokens are chosen among those that the masks allow. A
        failed row contains its error; if the whole step fails, `wait` raises."""


@runtime_checkable
class CountsLayers(Protocol):
    """A runner that reports the progress of a running step."""

    def count_layers(self, counter: memoryview) -> int:
        """Add 1 to this 8-byte counter after each computed layer, until the process ends. Returns the number of layers
        per step, or 0 if layers cannot be counted."""


class Runner(Protocol):
    """Computes steps. A row, the result of an item, depends only on its tokens, blocks, sampling parameters and mask.

    Draft tokens change only how many tokens a step returns. A row's result ends at the first draft that differs from
    the token the model chooses at that position; the next step may overwrite the KV written for rejected drafts.
    """

    @property
    def capacity(self) -> Capacity:
        """The limits of this runner, fixed at load."""

    def start(self, plan: StepPlan) -> PendingStep:
        """Begin a step: first all copies in order (of whole blocks and whole state slots), then the items, and after
        all items the copies of states to keep."""

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Return the KV of whole blocks as bytes, in the layout documented by the runner's KV store."""

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        """Write bytes returned by `read_blocks` into these blocks, which may be other blocks than the ones read."""

    def close(self) -> None:
        """Release all memory. A second call has no effect."""
