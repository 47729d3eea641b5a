"""Limits on the processor time spent on text from clients and fleet members. Pure: callers pass in measured seconds.

Tokenization, chat templates, grammars and their masks, parsing of model output, messages of fleet members: the time
for each depends on text that a client or a member sent. The time is charged to an account and has three limits:

    at once      for a single operation                           so that it does not block a step or the event loop
    request      for all operations of one kind for an account    an account is one request, or one connected member
    tenant       for all accounts of a tenant                     a leaky bucket that drains at a fixed rate

Only this module compares such times with limits. The code that does the work measures it, calls `spend`, and stops if
`spend` returns a `WorkCut`. A trace replay runs on another clock, so it uses the recorded cuts and makes no new ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Literal, TypeVar

import msgspec

from quire.errors import WorkBudgetError

SERVICE_TOKENS_PER_S = 1_000
"""A second of processor time counts as this many computed prompt tokens in the tenant's fair-share accounting."""
MAX_TENANTS = 4_096
"""Limit on the tenants with a bucket; beyond it, the emptiest bucket is dropped."""

Amount = TypeVar("Amount", int, float)


WorkKind = Literal[
    "grammar_check",
    "grammar_compile",  # in the worker, after the server has checked the grammar
    "grammar_mask",  # computing masks, and advancing the grammar by the sampled tokens
    "template",
    "tokenize",
    "answer_reader",
    "member_stream",
    "member_events",
]
"""The kinds of work. Metrics, logs and errors use the same names."""
WorkScope = Literal["at_once", "request", "tenant"]
"""The limit that was exceeded."""


@dataclass(frozen=True, slots=True)
class WorkLimit:
    """The limits of one kind of work, in seconds of processor time."""

    at_once_s: float
    """Limit of one operation."""
    request_s: float
    """Base limit of all operations of one account."""
    per_unit_s: float = 0.0
    """Increase of the request limit per unit of work (a mask, a token)."""
    has_turns: bool = False
    """Whether tenants take turns at this work. It is then exempt from the tenant limit, but its time is counted."""


LIMITS: Mapping[WorkKind, WorkLimit] = {
    "grammar_check": WorkLimit(at_once_s=0.2, request_s=0.3),
    "grammar_compile": WorkLimit(at_once_s=2.0, request_s=2.0, has_turns=True),
    "grammar_mask": WorkLimit(at_once_s=0.2, request_s=0.32, per_unit_s=0.02, has_turns=True),
    "template": WorkLimit(at_once_s=2.0, request_s=2.0, has_turns=True),
    "tokenize": WorkLimit(at_once_s=5.0, request_s=5.0, has_turns=True),
    "answer_reader": WorkLimit(at_once_s=0.1, request_s=1.0, per_unit_s=0.002),
    "member_stream": WorkLimit(at_once_s=0.05, request_s=1.0, per_unit_s=0.002),
    "member_events": WorkLimit(at_once_s=0.05, request_s=1.0, per_unit_s=0.000_05),
}
TENANT_RATE = 0.5
"""Sustained processor seconds per second that a tenant may use: the drain rate of its bucket."""
TENANT_BURST_S = 10.0
"""Processor seconds that a tenant may use in a burst: the size of its bucket."""


@dataclass(frozen=True, slots=True)
class WorkCut:
    """The decision to stop work because a limit was exceeded."""

    kind: WorkKind
    scope: WorkScope
    spent_s: float
    limit_s: float
    retry_after_s: int = 0
    """Seconds until the tenant's bucket has room again; 0 if a retry would exceed the same limit."""

    @property
    def error(self) -> WorkBudgetError:
        return WorkBudgetError(self.kind, self.scope, self.spent_s, self.limit_s, self.retry_after_s)


class WorkAccount(msgspec.Struct):
    """The processor time used so far by one request, or by one connected fleet member."""

    tenant: str
    spent_s: dict[WorkKind, float] = {}
    num_units: dict[WorkKind, int] = {}

    @property
    def total_s(self) -> float:
        return sum(self.spent_s.values())

    @property
    def service_tokens(self) -> int:
        """The account's time as computed prompt tokens, which the scheduler charges to the tenant."""
        return round(self.total_s * SERVICE_TOKENS_PER_S)


@dataclass(frozen=True, slots=True)
class WorkSpent:
    """The processor time and the cuts of a `WorkBudget`, for operators."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """Tenant -> total processor time."""
    num_cut: Mapping[str, int] = field(default_factory=dict)
    """Kind of work -> number of cuts."""

    def __add__(self, other: "WorkSpent") -> "WorkSpent":
        return WorkSpent(_sums(self.seconds, other.seconds), _sums(self.num_cut, other.num_cut))


@dataclass(slots=True)
class _Bucket:
    """A tenant's leaky bucket: its level at time `at_s`, and the total processor time of the tenant."""

    level_s: float = 0.0
    at_s: float = 0.0
    total_s: float = 0.0

    def drained(self, rate: float, now_s: float) -> float:
        return max(0.0, self.level_s - rate * max(0.0, now_s - self.at_s))


class WorkBudget:
    """Accounts for work and enforces the limits within one process. Not thread-safe: use one per thread, or a lock."""

    def __init__(
        self,
        limits: Mapping[WorkKind, WorkLimit] = LIMITS,
        tenant_rate: float = TENANT_RATE,
        tenant_burst_s: float = TENANT_BURST_S,
    ) -> None:
        self._limits = limits
        self._rate = tenant_rate
        self._burst_s = tenant_burst_s
        self._buckets: dict[str, _Bucket] = {}
        self.num_cut: dict[WorkKind, int] = {}

    def left_s(self, account: WorkAccount, kind: WorkKind, now_s: float, num_units: int = 1) -> float:
        """Return how many seconds the next operation may take, as a timeout for it; 0 if it must not start."""
        limit = self._limits[kind]
        request_left_s = self._request_limit_s(account, kind, num_units) - account.spent_s.get(kind, 0.0)
        left_s = max(0.0, min(limit.at_once_s, request_left_s))
        if limit.has_turns:
            return left_s
        bucket = self._buckets.get(account.tenant)
        tenant_left_s = self._burst_s - (0.0 if bucket is None else bucket.drained(self._rate, now_s))
        return max(0.0, min(left_s, tenant_left_s))

    def spend(
        self, account: WorkAccount, kind: WorkKind, seconds: float, now_s: float, num_units: int = 1
    ) -> WorkCut | None:
        """Charge a finished operation. Returns a `WorkCut` if a limit was exceeded: the caller then stops this work."""
        limit = self._limits[kind]
        spent_s = account.spent_s[kind] = account.spent_s.get(kind, 0.0) + seconds
        request_s = self._request_limit_s(account, kind, num_units)
        account.num_units[kind] = account.num_units.get(kind, 0) + num_units
        level_s = self._fill(account.tenant, seconds, 0.0 if limit.has_turns else seconds, now_s)
        if seconds > limit.at_once_s:
            cut = WorkCut(kind, "at_once", seconds, limit.at_once_s)
        elif spent_s > request_s:
            cut = WorkCut(kind, "request", spent_s, request_s)
        elif not limit.has_turns and level_s > self._burst_s:
            retry_after_s = max(1, ceil((level_s - self._burst_s) / self._rate))
            cut = WorkCut(kind, "tenant", level_s, self._burst_s, retry_after_s)
        else:
            return None
        self.num_cut[kind] = self.num_cut.get(kind, 0) + 1
        return cut

    def spent(self, max_tenants: int = MAX_TENANTS) -> "WorkSpent":
        """Return the summary for operators, limited to the `max_tenants` tenants with the highest totals."""
        buckets = sorted(self._buckets.items(), key=lambda entry: -entry[1].total_s)[:max_tenants]
        num_cut = {str(kind): count for kind, count in self.num_cut.items()}
        return WorkSpent({tenant: bucket.total_s for tenant, bucket in buckets}, num_cut)

    def _request_limit_s(self, account: WorkAccount, kind: WorkKind, num_units: int) -> float:
        limit = self._limits[kind]
        return limit.request_s + limit.per_unit_s * (account.num_units.get(kind, 0) + num_units)

    def _fill(self, tenant: str, seconds: float, counted_s: float, now_s: float) -> float:
        bucket = self._buckets.get(tenant)
        if bucket is None:
            if len(self._buckets) >= MAX_TENANTS:
                emptiest = min(self._buckets, key=lambda name: self._buckets[name].drained(self._rate, now_s))
                del self._buckets[emptiest]
            bucket = self._buckets[tenant] = _Bucket(at_s=now_s)
        bucket.level_s = bucket.drained(self._rate, now_s) + counted_s
        bucket.at_s = max(bucket.at_s, now_s)
        bucket.total_s += seconds
        return bucket.level_s


def _sums(a: Mapping[str, Amount], b: Mapping[str, Amount]) -> dict[str, Amount]:
    return {**a, **{name: a[name] + count if name in a else count for name, count in b.items()}}
