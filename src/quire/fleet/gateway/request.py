"""A request in a gateway: its ledger, its member, and the members that refused it."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from quire.core.events import Refused, RequestEvent
from quire.core.request import Request
from quire.errors import QueueFullError, TenantShareError
from quire.fleet.openai.requests import missing_feature
from quire.worker.parent.ledger import Ledger, LedgerEntry

QUARANTINE_MESSAGE = "three members were lost while running this request, with no token between; it was quarantined"


@dataclass(slots=True)
class FleetRequest:
    """A request in flight: from its submission to its last event."""

    request: Request
    ledger: Ledger
    """The record of what the client has received. One ledger per request, because requests are on different members."""
    member: str | None = None
    """Address of the member that has the request; None if the gateway holds it."""
    is_running: bool = False
    """Whether the member has admitted the request."""
    is_moving: bool = False
    """Whether the request has lost its member and has no new one yet."""
    exactness: str | None = None
    """`KnownMember.exactness` of the member that produced the first token."""
    refusals: dict[str, Refused] = field(default_factory=dict)
    """Refusals by member address, cleared when the held request is tried again."""
    names: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Block size -> block names (the router's hashes) of the full blocks of `tokens`."""

    @classmethod
    def of(cls, request: Request, vocabulary_size: int) -> "FleetRequest":
        """Create a request without a member."""
        ledger = Ledger(vocabulary_size, quarantine_message=QUARANTINE_MESSAGE)
        ledger.add(request)
        return cls(request, ledger)

    @property
    def entry(self) -> LedgerEntry:
        """The ledger's entry: what the client has received."""
        return self.ledger.entries[self.request.request_id]

    @property
    def needs_quire_member(self) -> bool:
        """Whether the request needs a feature that OpenAI members do not have."""
        request = self.request
        return missing_feature(request.params, request.grammar, request.adapter) is not None

    @property
    def has_ended(self) -> bool:
        return not self.ledger.entries

    @property
    def has_begun(self) -> bool:
        """Whether the client has received output. If so, the request can no longer be refused."""
        return bool(self.entry.ends) or any(self.entry.tokens.values())

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens to route by: the prompt, and the output so far if exactly one continuation is open."""
        open_answers = self.entry.open_answers
        return self.request.prompt + (open_answers[0].produced if len(open_answers) == 1 else ())

    def take_back(self, *, was_running: bool) -> list[RequestEvent]:
        """Detach the request from a member that is lost or refused it. Returns events for the client.

        Only a running request can have crashed the member; the crash count of a waiting request does not grow.
        """
        entry, num_strikes = self.entry, self.entry.num_strikes
        events = self.ledger.record_crash([self.request.request_id] if was_running else [])
        if not was_running:
            entry.num_strikes = num_strikes
        self.member, self.is_running = None, False
        return events

    def best_refusal(self) -> Refused:
        """Return the refusal with the shortest retry time among full members; if no member is full, the latest one."""
        full = [event for event in self.refusals.values() if isinstance(event.error, QueueFullError | TenantShareError)]
        latest = [*self.refusals.values()][-1]
        best = min(full, key=_retry_after_s, default=latest)
        return replace(best, epoch=latest.epoch)


def _retry_after_s(refusal: Refused) -> int:
    error = refusal.error
    return error.retry_after_s if isinstance(error, QueueFullError | TenantShareError) else 0
