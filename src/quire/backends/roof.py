"""The fastest a decode step could be on this machine, measured beside the step itself: what a backend can be asked for.

bare    the products of a step alone, by the fastest packed operator at exactly these rows (two for one)
roof    bare + KV bytes / bandwidth, the best native sum over 1 GiB
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RoofPoint:
    """Medians, in seconds."""

    step_s: float
    bare_s: float
    roof_s: float
    bytes_per_s: float


class Roof(Protocol):
    """What a model's products cost alone, or why that cannot be said."""

    @property
    def reason(self) -> str:
        """Why there is none; empty if there is."""

    def beside(self, step: Callable[[], object], num_rows: int, kv_bytes: float, num_steps: int) -> RoofPoint:
        """The step and its roof, interleaved."""
