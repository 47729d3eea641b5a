"""Convert a trace's rows to requests with token ids, for the simulated fleet members.

Token ids in a trace are used as they are. Otherwise a trace has names of content; each name gets one token id, which is
repeated for the length of its span. So two prompts are equal exactly where their names are, block by block, and a
prompt of a hundred thousand tokens is cheap to generate. Published traces have no tenants and classes; both are
assigned by conversation, so all rows with the same beginning get the same ones.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from quire.workload.traces import Row, Trace
from quire.workload.workload_request import WorkloadRequest

FIRST_OF_CONVERSATION = 2
"""Number of first hash ids that identify a conversation; one is too few, as it is often a shared system prompt."""
FIRST_TOKENS = 64
"""Number of first tokens that identify a conversation, if the trace has token ids."""


@dataclass(frozen=True, slots=True)
class TraceRules:
    """How to change a trace before it is sent to the members."""

    speedup: float = 1.0
    share: float = 1.0
    """Fraction of conversations to keep; their content determines which ones."""
    num_tenants: int = 1
    class_shares: Mapping[str, float] = field(default_factory=dict)
    """Fraction of conversations for each class; the rest is normal."""


def ruled_rows(trace: Trace, rules: TraceRules) -> Iterator[tuple[int, Row]]:
    """Yield the kept rows with their indices. The arrival times are scaled; missing tenants and classes are assigned,
    those in the trace are kept."""
    for index, row in enumerate(trace.rows):
        dice = _share_of(row, trace.name_of(index))
        if dice >= rules.share:
            continue
        tenant = row.tenant or f"tenant{int(_other_share(dice) * rules.num_tenants)}"
        priority = row.priority or _class_of(_other_share(_other_share(dice)), rules.class_shares)
        yield index, replace(row, arrival_s=row.arrival_s / rules.speedup, tenant=tenant, priority=priority)


def trace_requests(trace: Trace, rules: TraceRules = TraceRules()) -> Iterator[WorkloadRequest]:  # noqa: B008 - frozen
    """Yield the requests in order of arrival."""
    # Real token ids are shifted by one, because simulated output consists of 0. The ids of names follow above.
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
        yield WorkloadRequest(
            name=trace.name_of(index),
            arrival_s=row.arrival_s,
            prompt=tuple(prompt),
            max_tokens=turn.max_tokens,
            seed=0,
            tenant=row.tenant,
            priority=row.priority,
        )


def _share_of(row: Row, name: str) -> float:
    """Return a pseudo-random number from 0 to 1 that depends only on the row's conversation."""
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
