"""Outcomes made by hand."""

from collections.abc import Sequence
from dataclasses import replace

from quire.bench.outcome import Outcome


def outcome(sent_s: float, token_s: Sequence[float], *, output_tokens: int | None = None, **changes: object) -> Outcome:
    """An answer whose tokens came at these moments."""
    made = Outcome(
        name="r",
        kind="all",
        due_s=sent_s,
        sent_s=sent_s,
        ended_s=token_s[-1] if token_s else sent_s,
        token_s=tuple(token_s),
        pieces=("x",) * len(token_s),
        prompt_tokens=10,
        output_tokens=len(token_s) if output_tokens is None else output_tokens,
        cached_tokens=None,
        finish_reason="length",
    )
    return replace(made, **changes)  # type: ignore[arg-type]
