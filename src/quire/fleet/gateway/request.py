"""One request of a gateway's: its ledger, which member has it, and who has turned it away."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from quire.core.events import Refused, RequestEvent
from quire.core.request import Request
from quire.errors import QueueFullError, TenantShareError
from quire.fleet.openai.requests import lacking
from quire.worker.parent.ledger import Ledger
from quire.worker.parent.ledger_entry import LedgerEntry

POISON = "three members were lost while this request ran on them, with no token between; it was quarantined"


@dataclass(slots=True)
class FleetRequest:
    """On its way, from its submission to its last event."""

    request: Request
    ledger: Ledger
    """Of this request alone: it may be with another member than the next one."""
    member: str | None = None
    """Who has it; None: nobody, it is held."""
    is_running: bool = False
    """Its member says that it has begun with it."""
    is_moving: bool = False
    """The member that had it is gone, and nobody has it since."""
    exactness: str | None = None
    """Of the member that produced its first token."""
    refusals: dict[str, Refused] = field(default_factory=dict)
    """By the members that did not take it since it was held last."""
    names: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Block size -> names of its full blocks."""

    @classmethod
    def of(cls, request: Request, vocabulary_size: int) -> "FleetRequest":
        """One that nobody has yet."""
        ledger = Ledger(vocabulary_size, poison=POISON)
        ledger.add(request)
        return cls(request, ledger)

    @property
    def entry(self) -> LedgerEntry:
        """What its client was told."""
        return self.ledger.entries[self.request.request_id]

    @property
    def is_for_quire_alone(self) -> bool:
        """It needs what members of other makes have not."""
        request = self.request
        return lacking(request.params, request.grammar, request.adapter) is not None

    @property
    def has_ended(self) -> bool:
        """Its client has had the last event."""
        return not self.ledger.entries

    @property
    def has_begun(self) -> bool:
        """Its client has something of its answers: it is not turned away any more."""
        return bool(self.entry.ends) or any(self.entry.tokens.values())

    @property
    def tokens(self) -> tuple[int, ...]:
        """What a member has to have computed before it goes on: with several answers, what they have in common."""
        left = self.entry.left
        return self.request.prompt + (left[0].produced if len(left) == 1 else ())

    def taken_back(self, *, was_running: bool) -> list[RequestEvent]:
        """Its member is gone, or did not take it: nobody has it now, unless that was its end. What is to be told.

        Only who was running may have been at fault; whoever waited there is as much of a suspect as before.
        """
        entry, num_strikes = self.entry, self.entry.num_strikes
        told = self.ledger.crash([self.request.request_id] if was_running else [])
        if not was_running:
            entry.num_strikes = num_strikes
        self.member, self.is_running = None, False
        return told

    def best_refusal(self) -> Refused:
        """Of all members that had no room: of who has some first. One of another kind, if there are only such."""
        full = [one for one in self.refusals.values() if isinstance(one.error, QueueFullError | TenantShareError)]
        last = [*self.refusals.values()][-1]
        best = min(full, key=_retry_after_s, default=last)
        return replace(best, epoch=last.epoch)


def _retry_after_s(refusal: Refused) -> int:
    error = refusal.error
    return error.retry_after_s if isinstance(error, QueueFullError | TenantShareError) else 0
