"""Which member gets a request: the one with the least cost. One cost and no thresholds:

    cost  =  k x uncached tokens of the prompt there  +  uncached tokens in flight there          k = 4

With it a conversation stays where its blocks are until the queue there is worth more than computing them elsewhere; a
block that all members have is a small credit to all. Ties go to the member with less in flight, then to the one chosen
least recently, then by name. Nothing is random. Gateways with a salt have an order of their own among members never
chosen: otherwise all that start together would begin with the same member.

Several gateways do not see what the others have just sent (`load.unseen_tokens`), and would all send to the member that
reported least. Each therefore takes a part of that, from none to all, to be in flight at each member, by an
order of its own for each request.

To choose is to reserve: the tokens count as in flight and the blocks as held there from this moment on, so that the
next choice sees this one and a burst spreads.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from quire.core.memory.block_table import hit_cap
from quire.errors import ConfigError, InvariantError
from quire.fleet.routing.block_index import BlockIndex
from quire.fleet.routing.member_load import MemberLoads
from quire.fleet.routing.membership import Assignment, Membership, MemberState, Transition

UNCACHED_WEIGHT = 4.0
"""k: how many tokens of a member's queue one cached token is worth."""


LOTS = (1 << 64) - 1
MIX = 0xD1342543DE82EF95
"""An odd number without a pattern: a product with it spreads over all bits above."""


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """The fields of a request that decide where it goes."""

    request_id: str
    num_tokens: int
    names: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Block size -> names of its full blocks. Members of a size that is missing are chosen by load alone."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise InvariantError(
                f"expected a prompt of at least one token, got {self.num_tokens} for {self.request_id!r}"
            )


class RoutingChoice(NamedTuple):
    """A member for a request, and why."""

    member: str
    epoch: int
    num_cached_tokens: int
    """How much of the prompt it is expected to hold; at least one token is always computed."""
    cost: float

    @property
    def assignment(self) -> Assignment:
        """The assignment that every event of the request there must be of."""
        return Assignment(self.member, self.epoch)


_Offer = tuple[float, int, int, str, int]
"""Cost, tokens in flight, last chosen, member, cached tokens: the least, field by field, is the choice."""
_Group = tuple[float, int, Sequence[str]]
"""The cost of its members without what is in flight there, their cached tokens, and the members."""


@dataclass(slots=True)
class _Routed:
    """A request that a member has."""

    assignment: Assignment
    chosen_s: float
    unconfirmed: Sequence[int]
    """Blocks that it will leave there, until its prompt is computed."""


class Router:
    """Chooses members, and keeps their states, blocks and loads together."""

    def __init__(
        self,
        membership: Membership | None = None,
        index: BlockIndex | None = None,
        loads: MemberLoads | None = None,
        uncached_weight: float = UNCACHED_WEIGHT,
        salt: str = "",
    ) -> None:
        if uncached_weight < 0:
            raise ConfigError(f"expected an uncached_weight of at least 0, got {uncached_weight}")
        self.membership = Membership() if membership is None else membership
        """Read only: members come and go by the methods below."""
        self.index = BlockIndex() if index is None else index
        """Gets the members' KV events: `stored`, `removed`, `cleared`."""
        self.loads = MemberLoads() if loads is None else loads
        """Gets the members' reports: `report`."""
        self._uncached_weight = uncached_weight
        self._salt = salt.encode()
        self.num_gateways = 1
        """Those that choose among these members, this one included."""
        self._lots: dict[str, int] = {}
        """Member -> a number of this gateway's own."""
        self._unseen_tokens = self._lot = 0
        """Of the request that is chosen for: what others may have sent, and its own number."""
        self._block_sizes: dict[str, int] = {}
        self.ready_by_size: dict[int, frozenset[str]] = {}
        """Block size -> ready members of this size."""
        self.last_chosen: dict[str, int] = {}
        """Which choice a member was last, counted from 1; 0 or less: never."""
        self.routed: dict[str, _Routed] = {}
        self._num_choices = 0

    # -- members -------------------------------------------------------------------------------------------------------

    def join(self, member: str, block_size: int, now_s: float) -> int:
        """A member with an empty cache and nothing to do; it gets work once it is `ready`. Returns its epoch."""
        if block_size < 1:
            raise InvariantError(f"expected blocks of at least one token at {member!r}, got {block_size}")
        epoch = self.membership.join(member, now_s).epoch
        self.index.join(member)
        self.loads.join(member)
        self._block_sizes[member], self.last_chosen[member] = block_size, self._turn_of(member)
        self._lots[member] = self._lot_of(member)
        return epoch

    def _lot_of(self, name: str) -> int:
        return int.from_bytes(blake2b(self._salt + b" " + name.encode(), digest_size=8).digest(), "big")

    def _turn_of(self, member: str) -> int:
        """Before all choices; with a salt in an order of this gateway's own."""
        if not self._salt:
            return 0
        return -1 - (self._lot_of(member) >> 16)

    def ready(self, member: str, now_s: float) -> Transition:
        """It can compute from now on."""
        transition = self.membership.ready(member, now_s)
        self._followed((transition,))
        return transition

    def beat(self, member: str, now_s: float) -> Transition | None:
        """It is alive."""
        transition = self.membership.beat(member, now_s)
        if transition is not None:
            self._followed((transition,))
        return transition

    def doubt(self, member: str) -> tuple[Transition, ...]:
        """It cannot compute at this moment: no new work, until there is a heartbeat."""
        return self._followed(self.membership.doubt(member))

    def drain(self, member: str) -> tuple[Transition, ...]:
        """It gets no more work, and is gone as soon as it has none."""
        return self._followed(self.membership.drain(member))

    def leave(self, member: str) -> tuple[Transition, ...]:
        """It is gone. Its requests have to be moved, one by one."""
        return self._followed((self.membership.leave(member),))

    def advance(self, now_s: float) -> tuple[Transition, ...]:
        """Time has passed: suspect silent members, and sweep a little. To be called now and then."""
        transitions = self._followed(self.membership.advance(now_s))
        self.index.sweep(now_s)
        return transitions

    def _followed(self, transitions: tuple[Transition, ...]) -> tuple[Transition, ...]:
        for one in transitions:
            if one.after is MemberState.GONE:
                self.index.leave(one.member)
                self.loads.leave(one.member)
                del self._block_sizes[one.member], self.last_chosen[one.member], self._lots[one.member]
        if transitions:
            ready, sizes = self.membership.ready_members, self._block_sizes
            self.ready_by_size = {
                size: frozenset(member for member in ready if sizes[member] == size)
                for size in {sizes[member] for member in ready}
            }
        return transitions

    # -- requests ------------------------------------------------------------------------------------------------------

    def choose(self, prompt: RoutedPrompt, now_s: float, exclude: Collection[str] = ()) -> RoutingChoice | None:
        """Assign the request to the ready member with the least cost; None if there is no such member."""
        if prompt.request_id in self.routed:
            had = self.routed[prompt.request_id].assignment.member
            raise InvariantError(f"choose: {had!r} has {prompt.request_id!r}; it has to be moved first")
        self._unseen_tokens = self.loads.unseen_tokens(now_s, self.num_gateways)
        self._lot = self._lot_of(prompt.request_id) if self._unseen_tokens else 0
        best = self.best(prompt, exclude)
        self._unseen_tokens = 0
        if best is None:
            return None
        member = best.member
        assignment = self.membership.assign(member)
        self.loads.reserve(prompt.request_id, member, prompt.num_tokens - best.num_cached_tokens, now_s)
        names = prompt.names.get(self._block_sizes[member], ())
        self.index.optimistic(member, names, now_s)
        self.routed[prompt.request_id] = _Routed(assignment, now_s, names)
        self._num_choices += 1
        self.last_chosen[member] = self._num_choices
        return best

    def best(self, prompt: RoutedPrompt, exclude: Collection[str] = ()) -> RoutingChoice | None:
        """The member with the least cost: what `choose` would choose now. Changes nothing."""
        num_tokens, weight = prompt.num_tokens, self._uncached_weight
        best: _Offer | None = None

        def look(size: int, depth: int, members: Sequence[str]) -> int:
            """Nothing in flight is less than none: a member with too few blocks cannot beat the best so far."""
            nonlocal best
            offer = self._best_of_group((weight * (num_tokens - size * depth), size * depth, members))
            best = offer if best is None else min(best, offer)
            return int((num_tokens - best[0] / weight) / size) if weight else 0

        for size, names, ready in self._sizes(prompt, exclude):
            self.index.visit(names, ready, partial(look, size))
        if best is None:
            return None
        cost, _, _, member, num_cached = best
        return RoutingChoice(member, self.membership.ready_members[member].epoch, num_cached, cost)

    def rank(self, prompt: RoutedPrompt, exclude: Collection[str] = ()) -> list[RoutingChoice]:
        """All members that could get the request, the best first, with their costs. Changes nothing."""
        in_flight, epochs = self.loads.in_flight_tokens, self.membership.ready_members
        offers = [
            (base + in_flight[member], in_flight[member], self.last_chosen[member], member, num_cached)
            for base, num_cached, members in self._groups(prompt, exclude)
            for member in members
        ]
        return [
            RoutingChoice(member, epochs[member].epoch, num_cached, cost)
            for cost, _, _, member, num_cached in sorted(offers)
        ]

    def assignment_of(self, request_id: str) -> Assignment | None:
        """The assignment of the request, if a member has it."""
        routed = self.routed.get(request_id)
        return None if routed is None else routed.assignment

    def computed(self, request_id: str) -> None:
        """Its prompt is computed: it weighs on its member no more. Idempotent."""
        routed = self.routed.get(request_id)
        if routed is not None:
            routed.unconfirmed = ()
            self.loads.release(request_id)

    def ended(self, request_id: str) -> tuple[Transition, ...]:
        """It ended, well or not. Idempotent. A draining member leaves with its last request."""
        routed = self.routed.pop(request_id, None)
        if routed is None:
            return ()
        self.loads.release(request_id)
        return self._followed(self.membership.unassign(routed.assignment))

    def moved(self, request_id: str) -> tuple[Transition, ...]:
        """Its member did not take it, or lost it: it may be routed again, with that member
        excluded. Unless its prompt was computed, its blocks are no longer expected there."""
        routed = self.routed.get(request_id)
        if routed is not None and self.membership.is_current(routed.assignment):
            self.index.withdraw(routed.assignment.member, routed.unconfirmed, routed.chosen_s)
        return self.ended(request_id)

    def _sizes(
        self, prompt: RoutedPrompt, exclude: Collection[str]
    ) -> Iterator[tuple[int, Sequence[int], frozenset[str]]]:
        """Block sizes of members that could get the request, the names such members can hold, and the members."""
        for size, ready in self.ready_by_size.items():
            names = prompt.names.get(size, ())[: hit_cap(prompt.num_tokens, size)]
            yield size, names, ready.difference(exclude) if exclude else ready

    def _groups(self, prompt: RoutedPrompt, exclude: Collection[str]) -> Iterator[_Group]:
        """The members that could get the request, grouped where their cost differs by what is in flight alone.

        Members of different block sizes are compared in tokens.
        """
        for size, names, ready in self._sizes(prompt, exclude):
            for depth, members in self.index.groups(names, ready):
                num_cached = size * depth
                yield self._uncached_weight * (prompt.num_tokens - num_cached), num_cached, members

    def _unseen_part(self, member: str) -> int:
        mixed = (self._lots[member] ^ self._lot) * MIX & LOTS
        return self._unseen_tokens * ((mixed ^ mixed >> 31) * MIX & LOTS) // LOTS

    def _best_of_group(self, group: _Group) -> _Offer:
        base, num_cached, members = group
        in_flight, last_chosen = self.loads.in_flight_tokens, self.last_chosen
        if self._unseen_tokens:
            unseen = [(in_flight[one] + self._unseen_part(one), self._lots[one], one) for one in members]
            total, _, member = min(unseen)
            return base + total, in_flight[member], last_chosen[member], member, num_cached
        if len(members) == 1:  # a conversation's own member: the usual case
            member = members[0]
            return base + in_flight[member], in_flight[member], last_chosen[member], member, num_cached
        tokens = [in_flight[one] for one in members]
        least = min(tokens)
        if tokens.count(least) == 1:
            member = members[tokens.index(least)]
            return base + least, least, last_chosen[member], member, num_cached
        idlest = [one for one, num_tokens in zip(members, tokens, strict=True) if num_tokens == least]
        when, member = min([(last_chosen[one], one) for one in idlest])
        return base + least, least, when, member, num_cached
