"""A cost model of the duration of a step on one machine with one model: measured there, or set by hand.

    seconds =  per step
             + a curve over all tokens fed                weights are read once and shared by all rows
             + per decoding sequence                      logits of its last row, and sampling
             + per prompt token                           only for profiles set by hand
             + per token of context                       keys and values that the step reads
             + per pair of prompt token and context       attention over long prompts

A profile states its origin and its error on steps that were not used to fit it.
"""

import json
from bisect import bisect_left
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from quire.core.step import StepPlan
from quire.errors import ConfigError

COST_NAMES = ("step_s", "answering_s", "prompt_token_s", "context_token_s", "pair_s")
HAND_SET_KEYS = {"prompt": "prompt tokens/s", "answer": "answer tokens/s of one sequence", "kv": "KV bytes of a token"}
"""Keys of a profile that is set by hand; a further key is `bytes`: bytes/s at which keys and values are read."""


class StepLoad(NamedTuple):
    """The quantities of a step that determine its duration."""

    num_decoding: int
    """Number of decoding sequences: those that feed exactly one token."""
    num_prompt_tokens: int
    num_context_tokens: int
    """Number of tokens whose keys and values are read, summed over sequences."""
    num_pairs: int = 0
    """Attention pairs: each prompt token with every earlier token."""

    @classmethod
    def of(cls, plan: StepPlan) -> "StepLoad":
        """Return the load of a plan."""
        num_decoding = num_prompt_tokens = num_context_tokens = num_pairs = 0
        for item in plan.items:
            num_fed, first = len(item.token_ids), item.first_position
            num_context_tokens += first + num_fed
            if num_fed == 1:
                num_decoding += 1
            else:
                num_prompt_tokens += num_fed
                num_pairs += num_fed * (first + num_fed // 2)
        return cls(num_decoding, num_prompt_tokens, num_context_tokens, num_pairs)

    @property
    def num_rows(self) -> int:
        return self.num_decoding + self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class StepProfile:
    """The costs of a step, in seconds per unit."""

    name: str
    step_s: float = 0.0
    answering_s: float = 0.0
    prompt_token_s: float = 0.0
    context_token_s: float = 0.0
    pair_s: float = 0.0
    row_points: tuple[tuple[int, float], ...] = ()
    """(tokens fed, seconds), both rising; linear between two points, and extrapolated from the last two."""
    is_by_hand: bool = False
    """Whether the profile was set by hand, not measured."""
    relative_error: float = 0.0
    """Median relative error on steps that the profile was not fitted to."""

    def __post_init__(self) -> None:
        costs = {name: getattr(self, name) for name in COST_NAMES}
        invalid = {name: value for name, value in costs.items() if not 0.0 <= value < 3600.0}
        if invalid or not (any(costs.values()) or self.row_points):
            raise ConfigError(
                f"expected profile costs between 0 and 3,600 seconds and not all of them 0, got {invalid or costs}; "
                "correct the file, or leave --profile out",
                code="invalid_costs",
            )
        points = list(self.row_points)
        if len(points) == 1 or any(
            not 0 <= rows_a < rows_b or not 0.0 <= a_s <= b_s for (rows_a, a_s), (rows_b, b_s) in pairwise(points)
        ):
            raise ConfigError(f"expected no row_points in a profile, or at least two rising ones, got {points}")

    @property
    def origin(self) -> str:
        """The source of the step times, as a sentence for reports."""
        if self.is_by_hand:
            return "step times by hand: not measured"
        return f"step times of {self.name}, within {self.relative_error:.0%}"

    def duration_s(self, load: StepLoad, speed: float = 1.0) -> float:
        """Return the predicted duration of one step on a machine that is `speed` times as fast."""
        return (
            self.step_s
            + self.answering_s * load.num_decoding
            + self.prompt_token_s * load.num_prompt_tokens
            + self.context_token_s * load.num_context_tokens
            + self.pair_s * load.num_pairs
            + (self._rows_s(load.num_rows) if self.row_points else 0.0)
        ) / speed

    def _rows_s(self, num_rows: int) -> float:
        points = self.row_points
        index = min(max(bisect_left(points, (num_rows,)), 1), len(points) - 1)
        (rows_a, a_s), (rows_b, b_s) = points[index - 1], points[index]
        return max(0.0, a_s + (b_s - a_s) * (num_rows - rows_a) / (rows_b - rows_a))

    @classmethod
    def by_hand(
        cls, prompt_tokens_per_s: float, step_s: float, kv_bytes_per_token: float = 0.0, bytes_per_s: float = 1.0
    ) -> "StepProfile":
        """Return a profile without measurements, from the prefill speed, the duration of a step that only reads
        weights, and the size and read speed of keys and values."""
        return cls(
            "by hand",
            step_s,
            prompt_token_s=1.0 / prompt_tokens_per_s,
            context_token_s=kv_bytes_per_token / bytes_per_s,
            is_by_hand=True,
        )

    @classmethod
    def parse(cls, text: str) -> "StepProfile":
        """Parse a file name, or numbers set by hand: `prompt=16000,answer=100,kv=131072,bytes=2e12`."""
        if "=" not in text:
            return cls.read(Path(text))
        try:
            numbers = {name: float(number) for name, _, number in (part.partition("=") for part in text.split(","))}
            if not {"prompt", "answer"} <= numbers.keys() <= {*HAND_SET_KEYS, "bytes"} or min(numbers.values()) <= 0:
                raise ValueError("unexpected names, or not all numbers are above 0")
        except ValueError as error:
            keys = ", ".join(f"{name} ({meaning})" for name, meaning in HAND_SET_KEYS.items())
            raise ConfigError(
                f"expected {keys} and bytes (read in a second) as numbers for a profile by hand, the last two together "
                f"or not at all, got {text!r}: {error}; for example prompt=16000,answer=100"
            ) from error
        return cls.by_hand(
            numbers["prompt"], 1.0 / numbers["answer"], numbers.get("kv", 0.0), numbers.get("bytes", 1e12)
        )

    @classmethod
    def read(cls, path: Path) -> "StepProfile":
        """Read a JSON file with the fields of this class under `profile`. Raises ConfigError if it is invalid."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))["profile"]
            points = tuple((int(rows), float(took_s)) for rows, took_s in fields.pop("row_points", ()))
            return cls(row_points=points, **fields)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"the profile {path} cannot be read: {error}; make one with `quire bench engine MODEL --profile FILE`, "
                "or pass numbers such as prompt=16000,answer=100",
                code="cannot_read_profile",
            ) from error

    def as_json(self) -> dict[str, object]:
        """Return the object that `read` expects in a file."""
        return {"profile": asdict(self)}
