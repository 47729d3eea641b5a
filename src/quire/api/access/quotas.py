"""Quotas of a key: requests per minute, tokens per minute, and concurrent requests. Times are arguments.

A token bucket has a capacity of one minute's quota and refills evenly. Its state is one number, the time at which it
will be full again: taking increases that time, and no refill step is needed. Output tokens are taken as they arrive, so
running requests may overdraw a bucket, which must refill before another request is admitted.
"""

from dataclasses import dataclass, field

WINDOW_S = 60.0
ROUNDING_S = 1e-6
"""Times shorter than this count as zero; the rounding error of a clock after years of uptime is smaller."""


@dataclass(slots=True)
class Bucket:
    """A token bucket with a capacity of `per_minute`; after a minute without use it is full."""

    per_minute: int
    full_at_s: float = 0.0
    """Time at which the bucket will be full if nothing more is taken."""

    def wait_s(self, count: int, now_s: float) -> float:
        """Return the seconds until `count` may be taken; 0: now. A count above the capacity needs a full bucket."""
        needed_s = min(count, self.per_minute) * WINDOW_S / self.per_minute
        wait_s = self.reset_s(now_s) + needed_s - WINDOW_S
        return wait_s if wait_s > ROUNDING_S else 0.0

    def take(self, count: int, now_s: float) -> None:
        """Take `count`, even if that overdraws the bucket."""
        self.full_at_s = max(self.full_at_s, now_s) + count * WINDOW_S / self.per_minute

    def give_back(self, count: int) -> None:
        """Return `count` to the bucket."""
        self.full_at_s -= count * WINDOW_S / self.per_minute

    def available(self, now_s: float) -> int:
        """Return the number that may be taken now."""
        refilled_s = WINDOW_S - self.reset_s(now_s) + ROUNDING_S
        count = min(self.per_minute, max(0, int(refilled_s * self.per_minute / WINDOW_S)))
        # The count must agree with `wait_s`; because of rounding it can be off by one.
        if count < self.per_minute and self.wait_s(count + 1, now_s) == 0:
            return count + 1
        return count - 1 if count and self.wait_s(count, now_s) > 0 else count

    def reset_s(self, now_s: float) -> float:
        """Return the seconds until the bucket is full."""
        return max(0.0, self.full_at_s - now_s)


@dataclass(slots=True)
class Quota:
    """The limits of one tenant and its current use; a limit of None is no limit."""

    requests: Bucket | None = None
    tokens: Bucket | None = None
    concurrent: int | None = None
    num_open: int = 0


@dataclass(frozen=True, slots=True)
class Terms:
    """The limits of a key as the operator set them. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


@dataclass(slots=True)
class Quotas:
    """The quotas of all tenants; their number is bounded by the keys that the operator created."""

    _by_tenant: dict[str, Quota] = field(default_factory=dict)
    _terms: dict[str, Terms] = field(default_factory=dict)

    def of(self, tenant: str, terms: Terms) -> Quota:
        """Return the tenant's quota. Changed terms replace its buckets, but not the object that open requests use."""
        quota = self._by_tenant.setdefault(tenant, Quota())
        if self._terms.get(tenant) != terms:
            self._terms[tenant] = terms
            quota.requests, quota.tokens = _bucket(terms.requests_per_minute), _bucket(terms.tokens_per_minute)
            quota.concurrent = terms.concurrent
        return quota


def _bucket(per_minute: int | None) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute)
