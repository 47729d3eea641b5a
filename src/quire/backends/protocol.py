"""The contract between the core and whatever computes. A runner executes plans; it keeps no other state than KV.

One step is in flight at a time, and nothing is planned beside it (ADR 0029). `start` and `wait` are two, so that masks
can be made while a step runs: they are handed to `wait`. A runner may begin in `start` or do everything in `wait`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from quire.core.step import NO_MASKS, Masks, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a runner can hold, fixed when it is loaded."""

    num_blocks: int
    """Blocks that can be handed out: ids 1 to this. Block 0, the null block, comes on top; it holds no KV."""
    block_size: int
    max_sequence_tokens: int
    max_step_tokens: int
    """The most tokens one step can feed, over all its items."""
    vocabulary_size: int
    num_kv_bytes: int
    """Size of one block in the byte layout of `read_blocks`."""
    num_slots: int = 0
    """Slots for recurrent state that can be handed out: ids 1 to this; none of a model without recurrent layers. Slot 0
    comes on top: the state before the first token, which nothing is written to."""


class PendingStep(Protocol):
    """A step on its way."""

    def wait(self, masks: Masks = NO_MASKS) -> StepResult:
        """Block until the step is done; tokens are chosen among those the masks allow. A row that failed carries its
        error; a step that failed raises.
        """


@runtime_checkable
class CountsLayers(Protocol):
    """A runner whose steps can be looked into while they run."""

    def count_layers(self, counter: memoryview) -> int:
        """From now on, for as long as this process lives, add one to these eight bytes for each layer that is done; how
        many a step has, or 0 if they cannot be counted."""


class Runner(Protocol):
    """Computes steps. Every row's result depends on that row alone: its tokens, its blocks, its parameters, its mask.

    Drafts change nothing but how many tokens come at once: one that is not the token that would have been chosen in its
    place ends the row's result, and what was written for it may be overwritten by the next step.
    """

    @property
    def capacity(self) -> Capacity:
        """Fixed at load."""

    def start(self, plan: StepPlan) -> PendingStep:
        """Begin a step: first all copies, in their order, each of a whole block or a whole state slot; then the items;
        and when all of them are done, the states to keep."""

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """The KV of whole blocks, each in the runner's documented layout: how tiers take blocks away."""

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        """Put such bytes back, perhaps into other blocks."""

    def close(self) -> None:
        """Give everything back. Doing it twice does nothing."""
