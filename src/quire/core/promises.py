"""What tenants were told about when to come back. Pure: time is handed in.

A time that is told is a promise: a tenant that waits for it is let in. Two for each tenant, the first that is not used
up and the last, each good for one request. Nobody here knows which refusals a client had heard when it sent what was
refused or displaced next, so no refusal puts off the first; and whoever heard the last has the last. Who never stops
asking is let in no more often than who waits: once in the time it is told.
"""

from collections import OrderedDict
from dataclasses import dataclass

KEPT_S = 60.0
"""How long after its time a promise is still good."""


@dataclass(frozen=True, slots=True)
class Promise:
    """From when the first is good, and from when the last that was made since; both until a minute after the last."""

    first_due_s: float
    last_due_s: float | None = None

    @property
    def until_s(self) -> float:
        """From when on it is forgotten."""
        return max(self.first_due_s, self.last_due_s or 0.0) + KEPT_S


class Promises(OrderedDict[str, Promise]):
    """By tenant, two for each at most; the latest last."""

    def come(self, tenant: str, now_s: float) -> bool:
        """The tenant asks: whether it comes at a time it was told, which is then used up."""
        promise = self.get(tenant)
        if promise is None or now_s < promise.first_due_s:
            return False
        if promise.last_due_s is None:
            del self[tenant]
        else:
            self[tenant] = Promise(promise.last_due_s)
        return now_s <= promise.until_s

    def tell(self, tenant: str, now_s: float, retry_after_s: float) -> None:
        """The tenant is refused and told to wait."""
        due_s, before = now_s + retry_after_s, self.get(tenant)
        if before is None or before.until_s < now_s:
            self[tenant] = Promise(due_s)
        else:
            self[tenant] = Promise(min(before.first_due_s, due_s), due_s)
        self.move_to_end(tenant)
        while next(iter(self.values())).until_s < now_s:
            self.popitem(last=False)
