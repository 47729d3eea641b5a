"""A trace's rows as requests of token ids, which the simulator's members take.

Token ids are taken as they are. Else content is named in a trace, and so it stays: every name has one token id of its
own, and a span of it is that id again and again. Two prompts are then equal as far as their names are, block by block,
and a prompt of a hundred thousand tokens costs nothing to write. Tenants and classes, which no published trace has, are
dealt out by conversation: all rows that begin alike have the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from quire.workload.traces import Row, Trace
from quire.workload.workload_request import WorkloadRequest

FIRST_OF_CONVERSATION = 2
"""Hash ids that distinguish conversations: the first is often a system prompt that all share."""
FIRST_TOKENS = 64
"""The same where a trace has token ids."""


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


def ruled_rows(trace: Trace, rules: TraceRules) -> Iterator[tuple[int, Row]]:
    """Rows that are kept, with their numbers: each at its moment, with a tenant and a class. Those of the
    trace itself stay."""
    for index, row in enumerate(trace.rows):
        dice = _share_of(row, trace.name_of(index))
        if dice >= rules.share:
            continue
        tenant = row.tenant or f"tenant{int(_other_share(dice) * rules.num_tenants)}"
        priority = row.priority or _class_of(_other_share(_other_share(dice)), rules.class_shares)
        yield index, replace(row, arrival_s=row.arrival_s / rules.speedup, tenant=tenant, priority=priority)


def trace_requests(trace: Trace, rules: TraceRules = TraceRules()) -> Iterator[WorkloadRequest]:  # noqa: B008 - frozen
    """In order of arrival."""
    # Real token ids, one up: 0 is what simulated answers are made of. Names of content have ids above them.
    highest = max((1 + max(row.token_ids) for row in trace.rows if row.token_ids), default=0)
    ids: dict[str, int] = {}
    for index, row in ruled_rows(trace, rules):
        turn = trace.turn(index)
        prompt: list[int] = []
        if row.token_ids and trace.factor == 1.0:
            prompt = [one + 1 for one in row.token_ids]
        else:
            for span in turn.spans:
                prompt += [ids.setdefault(span.name, highest + len(ids) + 1)] * span.num_tokens
        max_tokens = (
            turn.max_tokens if rules.max_output_tokens is None else min(turn.max_tokens, rules.max_output_tokens)
        )
        yield WorkloadRequest(
            name=trace.name_of(index),
            arrival_s=row.arrival_s,
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            seed=0,
            tenant=row.tenant,
            priority=row.priority,
        )


def sampled(trace: Trace, share: float) -> Trace:
    """The rows of so many of its conversations: the same ones as `TraceRules` keeps."""
    kept = (row for at, row in enumerate(trace.rows) if _share_of(row, trace.name_of(at)) < share)
    return replace(trace, rows=tuple(kept))


def _share_of(row: Row, name: str) -> float:
    """A number from 0 to 1 that belongs to the row's conversation."""
    beginning = row.token_ids[:FIRST_TOKENS] or row.hash_ids[:FIRST_OF_CONVERSATION]
    return _other_share(repr(beginning) if beginning else name)


def _other_share(what: object) -> float:
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=6).digest()) / 2**48


def _class_of(dice: float, shares: Mapping[str, float]) -> str:
    for name, share in shares.items():
        if dice < share:
            return name
        dice -= share
    return "normal"
