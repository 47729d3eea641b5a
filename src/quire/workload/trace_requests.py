"""A trace's rows as requests of token ids, which the simulator's members take.

Content is named in a trace, and so it stays: every name has one token id of its own, and a span of it is that id again
and again. Two prompts are then equal as far as their names are, block by block, and a prompt of a hundred thousand
tokens costs nothing to write. Tenants and classes, which no published trace has, are dealt out by conversation: all
rows that begin alike have the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from quire.workload.traces import Row, Trace
from quire.workload.workload_request import WorkloadRequest

FIRST_OF_CONVERSATION = 2
"""Hash ids that tell conversations apart: the first is often a system prompt that all share."""


@dataclass(frozen=True, slots=True)
class TraceRules:
    """How a trace is changed on its way to the members."""

    speedup: float = 1.0
    share: float = 1.0
    """Of conversations that are kept; which ones depends on their content alone."""
    num_tenants: int = 1
    class_shares: Mapping[str, float] = field(default_factory=dict)
    """Of conversations, by class; what is left is normal."""
    max_output_tokens: int | None = None


def trace_requests(trace: Trace, rules: TraceRules = TraceRules()) -> Iterator[WorkloadRequest]:  # noqa: B008 - frozen
    """In order of arrival."""
    ids: dict[str, int] = {}
    for row, visit in zip(trace.rows, trace.visits(rules.speedup), strict=True):
        dice = _share_of(row, visit.name)
        if dice >= rules.share:
            continue
        (turn,) = visit.turns
        prompt: list[int] = []
        for span in turn.spans:
            prompt += [ids.setdefault(span.name, len(ids) + 1)] * span.num_tokens
        max_tokens = (
            turn.max_tokens if rules.max_output_tokens is None else min(turn.max_tokens, rules.max_output_tokens)
        )
        yield WorkloadRequest(
            name=visit.name,
            arrival_s=visit.arrival_s or 0.0,
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            seed=0,
            tenant=f"tenant{int(_other_share(dice) * rules.num_tenants)}",
            priority=_class_of(_other_share(_other_share(dice)), rules.class_shares),
        )


def sampled(trace: Trace, share: float) -> Trace:
    """The rows of so many of its conversations: the same ones as `TraceRules` keeps."""
    kept = (row for at, row in enumerate(trace.rows) if _share_of(row, f"{trace.name}{at}") < share)
    return replace(trace, rows=tuple(kept))


def _share_of(row: Row, name: str) -> float:
    """A number from 0 to 1 that belongs to the row's conversation."""
    said = repr(row.hash_ids[:FIRST_OF_CONVERSATION]) if row.hash_ids else name
    return _other_share(said)


def _other_share(what: object) -> float:
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=6).digest()) / 2**48


def _class_of(dice: float, shares: Mapping[str, float]) -> str:
    for name, share in shares.items():
        if dice < share:
            return name
        dice -= share
    return "normal"
