"""One request of a gateway's: its ledger, its member, and the members that refused it."""

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
    """From its submission to its last event."""

    request: Request
    ledger: Ledger
    """Of this request alone: the next request may be at another member."""
    member: str | None = None
    """The member that has it; None: it is held."""
    is_running: bool = False
    """Its member has admitted it."""
    is_moving: bool = False
    """Its member is gone, and it has no other yet."""
    exactness: str | None = None
    """Of the member that produced its first token."""
    refusals: dict[str, Refused] = field(default_factory=dict)
    """By members, since the request was held last."""
    names: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Block size -> names of its full blocks."""

    @classmethod
    def of(cls, request: Request, vocabulary_size: int) -> "FleetRequest":
        """A request without a member."""
        ledger = Ledger(vocabulary_size, poison=POISON)
        ledger.add(request)
        return cls(request, ledger)

    @property
    def entry(self) -> LedgerEntry:
        """What was sent to its client."""
        return self.ledger.entries[self.request.request_id]

    @property
    def is_for_quire_alone(self) -> bool:
        """It needs a feature that OpenAI members do not have."""
        request = self.request
        return lacking(request.params, request.grammar, request.adapter) is not None

    @property
    def has_ended(self) -> bool:
        return not self.ledger.entries

    @property
    def has_begun(self) -> bool:
        """Its client has some output: it can no longer be refused."""
        return bool(self.entry.ends) or any(self.entry.tokens.values())

    @property
    def tokens(self) -> tuple[int, ...]:
        """What a member must have computed before it continues: with several answers, what they have in common."""
        left = self.entry.left
        return self.request.prompt + (left[0].produced if len(left) == 1 else ())

    def taken_back(self, *, was_running: bool) -> list[RequestEvent]:
        """Its member is gone, or did not take it: it is held, unless that ended it. Returns events for the client.

        Only a running request can have crashed its member; a waiting one is no more of a suspect than before.
        """
        entry, num_strikes = self.entry, self.entry.num_strikes
        events = self.ledger.crash([self.request.request_id] if was_running else [])
        if not was_running:
            entry.num_strikes = num_strikes
        self.member, self.is_running = None, False
        return events

    def best_refusal(self) -> Refused:
        """Of all full members, the one with the shortest retry time. If none is full, the latest refusal."""
        full = [one for one in self.refusals.values() if isinstance(one.error, QueueFullError | TenantShareError)]
        last = [*self.refusals.values()][-1]
        best = min(full, key=_retry_after_s, default=last)
        return replace(best, epoch=last.epoch)


def _retry_after_s(refusal: Refused) -> int:
    error = refusal.error
    return error.retry_after_s if isinstance(error, QueueFullError | TenantShareError) else 0
