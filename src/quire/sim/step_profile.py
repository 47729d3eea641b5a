"""How long a step takes on some machine with some model: a line through what was measured there, or numbers that a
person gives.

    seconds = per step + per sequence x rows that answer + per token x prompt tokens + per token read x context

A profile says where it comes from and how far it was off from the steps it was made of.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from quire.core.step import StepPlan
from quire.errors import ConfigError


class StepLoad(NamedTuple):
    """What of a step costs time."""

    num_answering: int
    """Sequences that feed one token."""
    num_prompt_tokens: int
    num_context_tokens: int
    """Tokens whose keys and values are read, by all rows of all sequences together, each sequence's once a step."""

    @classmethod
    def of(cls, plan: StepPlan) -> "StepLoad":
        """Of what was planned."""
        num_answering = num_prompt_tokens = num_context_tokens = 0
        for item in plan.items:
            num_fed = len(item.token_ids)
            num_context_tokens += item.first_position + num_fed
            if num_fed == 1:
                num_answering += 1
            else:
                num_prompt_tokens += num_fed
        return cls(num_answering, num_prompt_tokens, num_context_tokens)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """The cost of steps."""

    name: str
    step_s: float
    answering_s: float
    prompt_token_s: float
    context_token_s: float
    is_by_hand: bool = False
    """Given by a person and not measured."""
    relative_error: float = 0.0
    """The median difference from the steps it was fitted to, over what they took."""

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("step_s", "answering_s", "prompt_token_s", "context_token_s")}
        wrong = {name: value for name, value in given.items() if not 0.0 <= value < 3600.0}
        if wrong or not any(given.values()):
            raise ConfigError(
                f"a profile's costs must be from 0 to 3,600 seconds and not all of them 0, {wrong or given} given; "
                "mend the file, or leave --profile out"
            )

    def duration_s(self, load: StepLoad, speed: float = 1.0) -> float:
        """Of one step, on a machine so many times as fast."""
        return (
            self.step_s
            + self.answering_s * load.num_answering
            + self.prompt_token_s * load.num_prompt_tokens
            + self.context_token_s * load.num_context_tokens
        ) / speed

    @classmethod
    def by_hand(
        cls, prompt_tokens_per_s: float, step_s: float, kv_bytes_per_token: float = 0.0, bytes_per_s: float = 1.0
    ) -> "StepProfile":
        """Of a machine nobody has measured: how fast prompts are read, how long a step takes that only reads weights,
        and how fast keys and values are."""
        return cls("by hand", step_s, 0.0, 1.0 / prompt_tokens_per_s, kv_bytes_per_token / bytes_per_s, is_by_hand=True)

    @classmethod
    def read(cls, path: Path) -> "StepProfile":
        """From a JSON file with the fields of this class under `profile`."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return cls(**fields["profile"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the profile {path} cannot be read: {error}; give a file of this form, or leave --profile out"
            ) from error

    def as_json(self) -> dict[str, object]:
        """What `read` takes."""
        return {"profile": asdict(self)}
