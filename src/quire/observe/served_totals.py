"""Sums over a server's finished requests. Two reads give what was done in the time between them."""

from dataclasses import dataclass


@dataclass(slots=True)
class ServedTotals:
    """The sums, as `/stats` has them."""

    num_requests: int = 0
    num_aborted: int = 0
    """Requests whose client disconnected, or that were ended early."""
    num_output_tokens: int = 0
    prompt_s: float = 0.0
    """Time from leaving the queue to the first token, or to the end of a request without tokens."""
    output_s: float = 0.0
    """Time from the first token to the end."""
