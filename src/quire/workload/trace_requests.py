"""Convert a trace's rows to requests with token ids, for the simulated fleet members.

Token ids in a trace are shifted by one, because 0 is the simulated output token. Without token ids, or if lengths are
scaled, each name of a span (`visits`) gets one token id, which is repeated for the length of the span. So prompts are
equal exactly where their names are, and long prompts are cheap to generate. Published traces have no tenants and
classes; both are derived from the beginning of the prompt, so all requests of a conversation get the same ones.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from quire.workload.traces import Row, Trace
from quire.workload.workload_request import WorkloadRequest

NUM_CONVERSATION_HASH_IDS = 2
"""Number of leading hash ids that identify a conversation; the first alone is often a shared system prompt."""
NUM_CONVERSATION_TOKENS = 64
"""Number of leading tokens that identify a conversation, if the trace has token ids."""


@dataclass(frozen=True, slots=True)
class TraceRules:
    """How to change a trace before it is sent to the members."""

    speedup: float = 1.0
    share: float = 1.0
    """Fraction of conversations to keep; their content determines which ones."""
    num_tenants: int = 1
    class_shares: Mapping[str, float] = field(default_factory=dict)
    """Fraction of conversations for each class; the rest is normal."""


def apply_rules(trace: Trace, rules: TraceRules) -> Iterator[tuple[int, Row]]:
    """Yield the rows that `rules.share` keeps, with their indices. Arrival times are scaled by `rules.speedup`; rows
    without a tenant or class get one."""
    for index, row in enumerate(trace.rows):
        fraction = _conversation_fraction(row, trace.name_of(index))
        if fraction >= rules.share:
            continue
        tenant = row.tenant or f"tenant{int(_hash_fraction(fraction) * rules.num_tenants)}"
        priority = row.priority or _class_of(_hash_fraction(_hash_fraction(fraction)), rules.class_shares)
        yield index, replace(row, arrival_s=row.arrival_s / rules.speedup, tenant=tenant, priority=priority)


def trace_requests(trace: Trace, rules: TraceRules = TraceRules()) -> Iterator[WorkloadRequest]:  # noqa: B008 - frozen
    """Yield the requests in order of arrival."""
    # Names get the ids above those of the token ids, which are shifted by one.
    highest_id = max((1 + max(row.token_ids) for row in trace.rows if row.token_ids), default=0)
    id_of_name: dict[str, int] = {}
    for index, row in apply_rules(trace, rules):
        turn = trace.turn(index)
        prompt: list[int] = []
        if row.token_ids and trace.length_scale == 1.0:
            prompt = [token_id + 1 for token_id in row.token_ids]
        else:
            for span in turn.spans:
                prompt += [id_of_name.setdefault(span.name, highest_id + len(id_of_name) + 1)] * span.num_tokens
        yield WorkloadRequest(
            name=trace.name_of(index),
            arrival_s=row.arrival_s,
            prompt=tuple(prompt),
            max_tokens=turn.max_tokens,
            seed=0,
            tenant=row.tenant,
            priority=row.priority,
        )


def _conversation_fraction(row: Row, name: str) -> float:
    """Return a pseudo-random number from 0 to 1 that depends only on the row's conversation."""
    beginning = row.token_ids[:NUM_CONVERSATION_TOKENS] or row.hash_ids[:NUM_CONVERSATION_HASH_IDS]
    return _hash_fraction(repr(beginning) if beginning else name)


def _hash_fraction(value: object) -> float:
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=6).digest()) / 2**48


def _class_of(fraction: float, shares: Mapping[str, float]) -> str:
    for name, share in shares.items():
        if fraction < share:
            return name
        fraction -= share
    return "normal"
