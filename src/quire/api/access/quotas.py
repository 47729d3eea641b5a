"""What a key may use: requests and tokens per minute, and how many at once. Pure; the time is passed in.

A bucket holds one minute's worth and refills evenly. It is kept as one number, the moment at which it will be full
again: taking adds to it, time passes by itself, and nothing has to be topped up. Tokens of an answer are taken when it
ends, so running requests may overdraw a bucket; then it has to refill before another is admitted.
"""

from dataclasses import dataclass, field

WINDOW_S = 60.0
ROUNDING_S = 1e-6
"""A clock that has run for years rounds to less than this: so short a time is none."""


@dataclass(slots=True)
class Bucket:
    """So many a minute, all of them at once after a minute without use."""

    per_minute: int
    full_at_s: float = 0.0
    """When it will be full if nothing more is taken."""

    def wait_s(self, count: int, now_s: float) -> float:
        """How long until `count` more may be taken; 0: now. What can never fit is taken from a full bucket."""
        needed_s = min(count, self.per_minute) * WINDOW_S / self.per_minute
        wait_s = self.reset_s(now_s) + needed_s - WINDOW_S
        return wait_s if wait_s > ROUNDING_S else 0.0

    def take(self, count: int, now_s: float) -> None:
        """Take them, whether they are there or not."""
        self.full_at_s = max(self.full_at_s, now_s) + count * WINDOW_S / self.per_minute

    def give_back(self, count: int) -> None:
        """What was taken for nothing."""
        self.full_at_s -= count * WINDOW_S / self.per_minute

    def left(self, now_s: float) -> int:
        """How many may be taken now."""
        there_s = WINDOW_S - self.reset_s(now_s) + ROUNDING_S
        count = min(self.per_minute, max(0, int(there_s * self.per_minute / WINDOW_S)))
        # Rounding may put this off by one from `wait_s`, which must agree.
        if count < self.per_minute and self.wait_s(count + 1, now_s) == 0:
            return count + 1
        return count - 1 if count and self.wait_s(count, now_s) > 0 else count

    def reset_s(self, now_s: float) -> float:
        """How long until it is full."""
        return max(0.0, self.full_at_s - now_s)


@dataclass(slots=True)
class Quota:
    """What one tenant has used of what it may. None: no bound."""

    requests: Bucket | None = None
    tokens: Bucket | None = None
    concurrent: int | None = None
    num_open: int = 0


@dataclass(frozen=True, slots=True)
class Terms:
    """What a key allows."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


@dataclass(slots=True)
class Quotas:
    """Of all tenants. One for each key there is: as many as the operator made."""

    _by_tenant: dict[str, Quota] = field(default_factory=dict)
    _terms: dict[str, Terms] = field(default_factory=dict)

    def of(self, tenant: str, terms: Terms) -> Quota:
        """The tenant's. Changed terms begin new buckets in it; open requests keep and release the same quota."""
        quota = self._by_tenant.setdefault(tenant, Quota())
        if self._terms.get(tenant) != terms:
            self._terms[tenant] = terms
            quota.requests, quota.tokens = _bucket(terms.requests_per_minute), _bucket(terms.tokens_per_minute)
            quota.concurrent = terms.concurrent
        return quota


def _bucket(per_minute: int | None) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute)
