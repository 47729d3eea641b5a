"""What text from outside may cost in processor time. Pure: seconds are handed in, a verdict is returned.

Tokenising, templates, grammars and their masks, reading answers, what members of a fleet send: how long each takes
follows from what a client or a member wrote. Every such piece of work has a payer, and is bounded three times:

    at once      one piece, however it came about             a step, or the event loop, is never held for longer
    request      all pieces of one kind for one account       an account is one request, or one connected member
    tenant       all accounts of a tenant together            a bucket that empties at a fixed rate

The one place where such seconds are compared: the worker of a piece measures it, calls `spend` and obeys the verdict.
Clocks differ between a run and its replay, so a cut is recorded where it was made, and never decided twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from typing import TypeVar

import msgspec

from quire.errors import WorkBudgetError

SERVICE_TOKENS_PER_S = 1_000
"""A second of processor time is charged to a tenant's service as this many computed prompt tokens."""
MAX_TENANTS = 4_096
"""Tenants whose buckets are kept; one that is forgotten had the emptiest."""

Amount = TypeVar("Amount", int, float)


class WorkKind(StrEnum):
    """What was worked on. Metrics, logs and errors name it by its value."""

    GRAMMAR_CHECK = "grammar_check"
    GRAMMAR_COMPILE = "grammar_compile"
    """Once more in the worker, of a grammar that was found right."""
    GRAMMAR_MASK = "grammar_mask"
    """Masks, and following the tokens that were chosen."""
    TEMPLATE = "template"
    TOKENIZE = "tokenize"
    ANSWER_READER = "answer_reader"
    MEMBER_STREAM = "member_stream"
    MEMBER_EVENTS = "member_events"


class WorkScope(StrEnum):
    """Which of the three bounds was passed."""

    AT_ONCE = "at_once"
    REQUEST = "request"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class WorkLimit:
    """Of one kind of work, in seconds of processor time."""

    at_once_s: float
    """One piece."""
    request_s: float
    """All pieces of one account, before units are counted."""
    per_unit_s: float = 0.0
    """What each unit (a mask, a token) adds to that."""
    has_turns: bool = False
    """Tenants take turns where it is done: it is charged, and no tenant is cut for it."""


LIMITS: Mapping[WorkKind, WorkLimit] = {
    WorkKind.GRAMMAR_CHECK: WorkLimit(at_once_s=0.2, request_s=0.3),
    WorkKind.GRAMMAR_COMPILE: WorkLimit(at_once_s=2.0, request_s=2.0, has_turns=True),
    WorkKind.GRAMMAR_MASK: WorkLimit(at_once_s=0.2, request_s=0.32, per_unit_s=0.02, has_turns=True),
    WorkKind.TEMPLATE: WorkLimit(at_once_s=2.0, request_s=2.0, has_turns=True),
    WorkKind.TOKENIZE: WorkLimit(at_once_s=5.0, request_s=5.0, has_turns=True),
    WorkKind.ANSWER_READER: WorkLimit(at_once_s=0.1, request_s=1.0, per_unit_s=0.002),
    WorkKind.MEMBER_STREAM: WorkLimit(at_once_s=0.05, request_s=1.0, per_unit_s=0.002),
    WorkKind.MEMBER_EVENTS: WorkLimit(at_once_s=0.05, request_s=1.0, per_unit_s=0.000_05),
}
TENANT_RATE = 0.5
"""Seconds of processor time that a tenant's work may take in each second, for long."""
TENANT_BURST_S = 10.0
"""And at once, beyond that."""


@dataclass(frozen=True, slots=True)
class WorkCut:
    """The verdict that work ends here."""

    kind: WorkKind
    scope: WorkScope
    spent_s: float
    limit_s: float
    retry_after_s: int = 0
    """When a tenant's bucket has room again; 0 where another try would end the same way."""

    @property
    def error(self) -> WorkBudgetError:
        return WorkBudgetError(self.kind.value, self.scope.value, self.spent_s, self.limit_s, self.retry_after_s)


class WorkAccount(msgspec.Struct):
    """What one request, or one member, has cost so far."""

    tenant: str
    spent_s: dict[WorkKind, float] = {}
    num_units: dict[WorkKind, int] = {}

    @property
    def total_s(self) -> float:
        return sum(self.spent_s.values())

    @property
    def service_tokens(self) -> int:
        """What a scheduler charges for it."""
        return service_tokens(self.total_s)


@dataclass(frozen=True, slots=True)
class WorkSpent:
    """What operators see of a budget."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """By tenant."""
    num_cut: Mapping[str, int] = field(default_factory=dict)
    """Verdicts that work ends, by its kind."""

    def __add__(self, other: "WorkSpent") -> "WorkSpent":
        return WorkSpent(_sums(self.seconds, other.seconds), _sums(self.num_cut, other.num_cut))


@dataclass(slots=True)
class _Bucket:
    """A tenant's work: `level_s` at `at_s`, and all there ever was."""

    level_s: float = 0.0
    at_s: float = 0.0
    total_s: float = 0.0

    def drained(self, rate: float, now_s: float) -> float:
        return max(0.0, self.level_s - rate * max(0.0, now_s - self.at_s))


class WorkBudget:
    """The verdicts of one process. Not safe for threads: each has its own, or a lock around it."""

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
        """How long the next piece of work may take: what a timer is set to. 0 if none may begin."""
        limit = self._limits[kind]
        of_request = self._request_limit_s(account, kind, num_units) - account.spent_s.get(kind, 0.0)
        left_s = max(0.0, min(limit.at_once_s, of_request))
        if limit.has_turns:
            return left_s
        bucket = self._buckets.get(account.tenant)
        of_tenant = self._burst_s - (0.0 if bucket is None else bucket.drained(self._rate, now_s))
        return max(0.0, min(left_s, of_tenant))

    def spend(
        self, account: WorkAccount, kind: WorkKind, seconds: float, now_s: float, num_units: int = 1
    ) -> WorkCut | None:
        """Charge a piece of work that was done. A verdict if a bound is passed by it: there must be no more of it."""
        limit = self._limits[kind]
        spent_s = account.spent_s[kind] = account.spent_s.get(kind, 0.0) + seconds
        request_s = self._request_limit_s(account, kind, num_units)
        account.num_units[kind] = account.num_units.get(kind, 0) + num_units
        level_s = self._fill(account.tenant, seconds, 0.0 if limit.has_turns else seconds, now_s)
        if seconds > limit.at_once_s:
            cut = WorkCut(kind, WorkScope.AT_ONCE, seconds, limit.at_once_s)
        elif spent_s > request_s:
            cut = WorkCut(kind, WorkScope.REQUEST, spent_s, request_s)
        elif not limit.has_turns and level_s > self._burst_s:
            retry_after_s = max(1, ceil((level_s - self._burst_s) / self._rate))
            cut = WorkCut(kind, WorkScope.TENANT, level_s, self._burst_s, retry_after_s)
        else:
            return None
        self.num_cut[kind] = self.num_cut.get(kind, 0) + 1
        return cut

    def charged_s(self) -> dict[str, float]:
        """What each tenant's work has cost in all: for operators."""
        return {tenant: bucket.total_s for tenant, bucket in self._buckets.items()}

    def spent(self, most: int = MAX_TENANTS) -> "WorkSpent":
        """All of it for operators, of so many tenants: those that cost most."""
        charged = sorted(self.charged_s().items(), key=lambda one: -one[1])[:most]
        return WorkSpent(dict(charged), {kind.value: count for kind, count in self.num_cut.items()})

    def _request_limit_s(self, account: WorkAccount, kind: WorkKind, num_units: int) -> float:
        limit = self._limits[kind]
        return limit.request_s + limit.per_unit_s * (account.num_units.get(kind, 0) + num_units)

    def _fill(self, tenant: str, seconds: float, filling_s: float, now_s: float) -> float:
        bucket = self._buckets.get(tenant)
        if bucket is None:
            if len(self._buckets) >= MAX_TENANTS:
                emptiest = min(self._buckets, key=lambda name: self._buckets[name].drained(self._rate, now_s))
                del self._buckets[emptiest]
            bucket = self._buckets[tenant] = _Bucket(at_s=now_s)
        bucket.level_s = bucket.drained(self._rate, now_s) + filling_s
        bucket.at_s = max(bucket.at_s, now_s)
        bucket.total_s += seconds
        return bucket.level_s


def _sums(some: Mapping[str, Amount], others: Mapping[str, Amount]) -> dict[str, Amount]:
    return {**some, **{name: some[name] + count if name in some else count for name, count in others.items()}}


def service_tokens(seconds: float) -> int:
    """What so much processor time costs a tenant, in computed prompt tokens."""
    return round(seconds * SERVICE_TOKENS_PER_S)
