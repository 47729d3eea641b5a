"""One request in the parent's ledger: what its client has received, and what a worker has still to do. Pure."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from quire.core.events import Admitted
from quire.core.request import Continuation, FinishReason, Request
from quire.engine.commands import Restore, Submit

STRIKES = 2
"""Consecutive crashes with no token between after which a request must run alone."""


@dataclass(slots=True)
class LedgerEntry:
    """One request, and what its client has received."""

    request: Request
    is_queued: bool = False
    """A worker has admitted it: its queue does not refuse it again."""
    epoch: int | None = None
    """Its assignment to the worker; None: it is held, the worker does not have it."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, FinishReason] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    """Answers that ended on this side; the worker may send events of them until it has ended them too."""
    admitted: Admitted | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens not computed on the first pass; None until that pass is done."""
    first_pass_epoch: int | None = None
    """The assignment of that pass: its last event may correct the number."""
    num_prompt_logprobs: int = 0
    is_cancelled: bool = False
    num_strikes: int = 0

    @property
    def is_answered(self) -> bool:
        """Every answer has ended: there is nothing to request again."""
        return len(self.ends) == len(self.tokens)

    @property
    def is_suspect(self) -> bool:
        """It must run alone."""
        return self.num_strikes >= STRIKES

    @property
    def has_sent_output(self) -> bool:
        """This ledger has sent its client tokens or an end."""
        answers = self.request.continuations
        return bool(self.ends) or any(len(self.tokens[one.index]) > len(one.produced) for one in answers)

    @property
    def left(self) -> tuple[Continuation, ...]:
        """The answers still to be made, with the tokens they have."""
        return tuple(
            Continuation(one.index, tuple(self.tokens[one.index]))
            for one in self.request.continuations
            if one.index not in self.ends
        )

    def assigned(self, epoch: int, now_s: float) -> Submit | Restore:
        """The command for the worker: what is still to do, and how old the request is."""
        request = self.request
        kind = Restore if self.is_queued or request.has_begun else Submit
        # A request with output has a place, whatever waits by now.
        has_place = request.has_reservation or bool(self.ends) or any(self.tokens.values())
        return kind.sent(replace(request, epoch=epoch, continuations=self.left, has_reservation=has_place), now_s)
