"""What tenants were told about when to come back. Pure: time is handed in.

A time that is told is a promise: a tenant that waits for it is let in. One promise for each tenant, good for one
request. Whoever asks before the time and is refused again has a new promise instead of the old one. But a refusal of
something that was asked before the promise was made does not put it off: that tenant has sent nothing since.
"""

from collections import OrderedDict
from dataclasses import dataclass

KEPT_S = 60.0
"""How long after its time a promise is still good."""


@dataclass(frozen=True, slots=True)
class Promise:
    """When it was made, from when it is good, and how long."""

    told_s: float
    due_s: float
    until_s: float


class Promises:
    """One for each tenant at most."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, Promise] = OrderedDict()
        """The latest last."""

    def __len__(self) -> int:
        return len(self._of)

    def come(self, tenant: str, now_s: float) -> bool:
        """The tenant asks: whether it comes at the time it was told, which is then used up."""
        promise = self._of.get(tenant)
        if promise is None or now_s < promise.due_s:
            return False
        del self._of[tenant]
        return now_s <= promise.until_s

    def tell(self, tenant: str, asked_s: float, now_s: float, retry_after_s: float) -> None:
        """What the tenant asked at one time is refused at another, and it is told to wait."""
        due_s = now_s + retry_after_s
        told, before = Promise(now_s, due_s, due_s + KEPT_S), self._of.get(tenant)
        if before is not None and asked_s <= before.told_s:
            told = Promise(before.told_s, min(before.due_s, due_s), max(before.until_s, told.until_s))
        self._of[tenant] = told
        self._of.move_to_end(tenant)
        while next(iter(self._of.values())).until_s < now_s:
            self._of.popitem(last=False)
