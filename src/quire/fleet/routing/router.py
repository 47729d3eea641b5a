"""Chooses the member for a request: the one with the least cost. One cost function, no thresholds:

    cost  =  k x uncached tokens of the prompt on the member  +  uncached tokens in flight on the member          k = 4

A conversation stays on the member that has its blocks until that member's queue costs more than computing the blocks on
another one. Ties go to the member with fewer tokens in flight, then to the least recently chosen, then by address.
Nothing is random. A gateway's salt determines its own order among members that were never chosen; otherwise gateways
that start together would all begin with the same member.

A gateway does not see the latest requests of other gateways, so all of them would choose the member with the least
reported load. Each gateway therefore estimates these tokens (`MemberLoads.unseen_tokens`) and adds a pseudorandom
fraction of them, from 0 to 1, to each member's load, by a hash of gateway, request and member.

`choose` also reserves: the request's tokens count as in flight and its blocks as cached at once, so that a burst
of requests spreads over the members.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from quire.core.memory.block_table import max_hit_blocks
from quire.errors import ConfigError, InvariantError
from quire.fleet.routing.block_index import BlockIndex
from quire.fleet.routing.member_load import MemberLoads
from quire.fleet.routing.membership import Assignment, Membership, MemberState, Transition

UNCACHED_WEIGHT = 4.0
"""k: one cached token outweighs this many tokens of a member's queue."""
MAX_HASH = (1 << 64) - 1
HASH_FACTOR = 0xD1342543DE82EF95
"""Odd factor for multiplicative hashing to 64 bits."""


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """The fields of a request that routing depends on."""

    request_id: str
    num_tokens: int
    names: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Block size -> names of the prompt's full blocks. Members of other block sizes are chosen by load only."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise InvariantError(
                f"expected a prompt of at least one token, got {self.num_tokens} for {self.request_id!r}"
            )


class RoutingChoice(NamedTuple):
    """The chosen member for a request, with its cost."""

    member: str
    epoch: int
    num_cached_tokens: int
    """Prompt tokens expected in the member's cache; always less than the prompt."""
    cost: float

    @property
    def assignment(self) -> Assignment:
        """The assignment (member and epoch), by which later events are matched."""
        return Assignment(self.member, self.epoch)


_Offer = tuple[float, int, int, str, int]
"""(cost, tokens in flight, last chosen, member, cached tokens): the smallest tuple wins."""
_Group = tuple[float, int, Sequence[str]]
"""(cost without tokens in flight, cached tokens, members): members with equal cached tokens."""


@dataclass(slots=True)
class _RoutedRequest:
    """A request that is assigned to a member."""

    assignment: Assignment
    chosen_s: float
    unconfirmed: Sequence[int]
    """Names of the prompt's blocks, until the prompt is computed."""


class Router:
    """Chooses members, and keeps their states, blocks and loads consistent."""

    def __init__(
        self,
        membership: Membership | None = None,
        uncached_weight: float = UNCACHED_WEIGHT,
        salt: str = "",
    ) -> None:
        if uncached_weight < 0:
            raise ConfigError(f"expected an uncached_weight of at least 0, got {uncached_weight}")
        self.membership = Membership() if membership is None else membership
        """Read only: use the router's methods to change members."""
        self.index = BlockIndex()
        """Callers apply KV events here: `add_blocks`, `remove_blocks`, `clear_blocks`."""
        self.loads = MemberLoads()
        """Callers apply members' load reports here: `report`."""
        self._uncached_weight = uncached_weight
        self._salt = salt.encode()
        self.num_gateways = 1
        """Gateways that route to these members, including this one."""
        self._member_hashes: dict[str, int] = {}
        """Member -> hash of the gateway's salt and the member."""
        self._unseen_tokens = self._request_hash = 0
        """For the request that `choose` routes: the estimated tokens of other gateways, and the request's hash."""
        self.block_sizes: dict[str, int] = {}
        self.ready_by_size: dict[int, frozenset[str]] = {}
        """Block size -> ready members with this block size."""
        self.last_chosen: dict[str, int] = {}
        """Member -> number of the choice that last selected it, counted from 1; 0 or less if never chosen."""
        self.routed: dict[str, _RoutedRequest] = {}
        self._num_choices = 0

    # -- members -------------------------------------------------------------------------------------------------------

    def join(self, member: str, block_size: int, now_s: float) -> int:
        """Add a member with an empty cache and no load; return its epoch. It gets requests after `mark_ready`."""
        if block_size < 1:
            raise InvariantError(f"expected blocks of at least one token at {member!r}, got {block_size}")
        epoch = self.membership.join(member, now_s).epoch
        self.index.join(member)
        self.loads.join(member)
        self.block_sizes[member], self.last_chosen[member] = block_size, self._initial_turn(member)
        self._member_hashes[member] = self._hash_of(member)
        return epoch

    def _hash_of(self, name: str) -> int:
        return int.from_bytes(blake2b(self._salt + b" " + name.encode(), digest_size=8).digest(), "big")

    def _initial_turn(self, member: str) -> int:
        """Return a member's initial `last_chosen`: 0, or with a salt a negative number that differs per gateway."""
        if not self._salt:
            return 0
        return -1 - (self._hash_of(member) >> 16)

    def mark_ready(self, member: str, now_s: float) -> Transition:
        """Mark a joining member as ready: it has loaded its model."""
        transition = self.membership.mark_ready(member, now_s)
        self._apply_transitions((transition,))
        return transition

    def record_heartbeat(self, member: str, now_s: float) -> Transition | None:
        """Record a heartbeat: a suspect is ready again."""
        transition = self.membership.record_heartbeat(member, now_s)
        if transition is not None:
            self._apply_transitions((transition,))
        return transition

    def mark_suspect(self, member: str) -> tuple[Transition, ...]:
        """Suspect a member that is alive but cannot compute now; it gets no new work until its next heartbeat."""
        return self._apply_transitions(self.membership.mark_suspect(member))

    def drain(self, member: str) -> tuple[Transition, ...]:
        """Assign no new requests to a member; it is gone when it has no open request."""
        return self._apply_transitions(self.membership.drain(member))

    def leave(self, member: str) -> tuple[Transition, ...]:
        """Remove a member that is gone. The caller then calls `unassign` for each of its requests."""
        return self._apply_transitions((self.membership.leave(member),))

    def advance(self, now_s: float) -> tuple[Transition, ...]:
        """Suspect or remove members whose heartbeat is overdue, and sweep the index a little. Call it regularly."""
        transitions = self._apply_transitions(self.membership.advance(now_s))
        self.index.sweep(now_s)
        return transitions

    def _apply_transitions(self, transitions: tuple[Transition, ...]) -> tuple[Transition, ...]:
        for change in transitions:
            if change.new_state is MemberState.GONE:
                self.index.leave(change.member)
                self.loads.leave(change.member)
                del self.block_sizes[change.member], self.last_chosen[change.member], self._member_hashes[change.member]
        if transitions:
            ready, sizes = self.membership.ready_members, self.block_sizes
            self.ready_by_size = {
                size: frozenset(member for member in ready if sizes[member] == size)
                for size in {sizes[member] for member in ready}
            }
        return transitions

    # -- requests ------------------------------------------------------------------------------------------------------

    def choose(self, prompt: RoutedPrompt, now_s: float, exclude: Collection[str] = ()) -> RoutingChoice | None:
        """Assign the request to the ready member with the least cost; return None if no member is available."""
        if prompt.request_id in self.routed:
            member = self.routed[prompt.request_id].assignment.member
            raise InvariantError(f"choose: {member!r} has {prompt.request_id!r}; call unassign first")
        self._unseen_tokens = self.loads.unseen_tokens(now_s, self.num_gateways)
        self._request_hash = self._hash_of(prompt.request_id) if self._unseen_tokens else 0
        best = self.best(prompt, exclude)
        self._unseen_tokens = 0
        if best is not None:
            self.assign(prompt, best, now_s)
        return best

    def assign(self, prompt: RoutedPrompt, choice: RoutingChoice, now_s: float) -> None:
        """Record that the request was sent to the chosen member."""
        member = choice.member
        assignment = self.membership.assign(member)
        self.loads.reserve(prompt.request_id, member, prompt.num_tokens - choice.num_cached_tokens, now_s)
        names = prompt.names.get(self.block_sizes[member], ())
        self.index.expect_blocks(member, names, now_s)
        self.routed[prompt.request_id] = _RoutedRequest(assignment, now_s, names)
        self._num_choices += 1
        self.last_chosen[member] = self._num_choices

    def best(self, prompt: RoutedPrompt, exclude: Collection[str] = ()) -> RoutingChoice | None:
        """Return the ready member with the least cost, without assigning the request."""
        num_tokens, weight = prompt.num_tokens, self._uncached_weight
        best: _Offer | None = None

        def offer_group(size: int, depth: int, members: Sequence[str]) -> int:
            """Return the minimum depth at which a member without any tokens in flight could beat the best offer."""
            nonlocal best
            offer = self._best_of_group((weight * (num_tokens - size * depth), size * depth, members))
            best = offer if best is None else min(best, offer)
            return int((num_tokens - best[0] / weight) / size) if weight else 0

        for size, names, ready in self._candidates(prompt, exclude):
            self.index.visit(names, ready, partial(offer_group, size))
        if best is None:
            return None
        cost, _, _, member, num_cached = best
        return RoutingChoice(member, self.membership.ready_members[member].epoch, num_cached, cost)

    def mark_computed(self, request_id: str) -> None:
        """Remove a request from its member's load, because its prompt is computed. Idempotent."""
        routed = self.routed.get(request_id)
        if routed is not None:
            routed.unconfirmed = ()
            self.loads.release(request_id)

    def end_request(self, request_id: str) -> tuple[Transition, ...]:
        """Forget a request that has ended. Idempotent. A draining member is gone when its last request ends."""
        routed = self.routed.pop(request_id, None)
        if routed is None:
            return ()
        self.loads.release(request_id)
        return self._apply_transitions(self.membership.unassign(routed.assignment))

    def unassign(self, request_id: str) -> tuple[Transition, ...]:
        """Forget a request that its member refused or lost, so that it can be routed again, without that member. If its
        prompt was not computed, its blocks are no longer expected in the member's cache."""
        routed = self.routed.get(request_id)
        if routed is not None and self.membership.is_current(routed.assignment):
            self.index.withdraw_expected(routed.assignment.member, routed.unconfirmed, routed.chosen_s)
        return self.end_request(request_id)

    def _candidates(
        self, prompt: RoutedPrompt, exclude: Collection[str]
    ) -> Iterator[tuple[int, Sequence[int], frozenset[str]]]:
        """Yield each block size with the names that the prompt can hit, and the ready members not in `exclude`."""
        for size, ready in self.ready_by_size.items():
            names = prompt.names.get(size, ())[: max_hit_blocks(prompt.num_tokens, size)]
            yield size, names, ready.difference(exclude) if exclude else ready

    def _unseen_share(self, member: str) -> int:
        mixed_hash = (self._member_hashes[member] ^ self._request_hash) * HASH_FACTOR & MAX_HASH
        return self._unseen_tokens * ((mixed_hash ^ mixed_hash >> 31) * HASH_FACTOR & MAX_HASH) // MAX_HASH

    def _best_of_group(self, group: _Group) -> _Offer:
        base, num_cached, members = group
        in_flight, last_chosen = self.loads.in_flight_tokens, self.last_chosen
        if self._unseen_tokens:
            unseen = [(in_flight[name] + self._unseen_share(name), self._member_hashes[name], name) for name in members]
            total, _, member = min(unseen)
            return base + total, in_flight[member], last_chosen[member], member, num_cached
        if len(members) == 1:  # a conversation's own member: the usual case
            member = members[0]
            return base + in_flight[member], in_flight[member], last_chosen[member], member, num_cached
        tokens = [in_flight[name] for name in members]
        min_tokens = min(tokens)
        if tokens.count(min_tokens) == 1:
            member = members[tokens.index(min_tokens)]
            return base + min_tokens, min_tokens, last_chosen[member], member, num_cached
        idlest_members = [name for name, num_tokens in zip(members, tokens, strict=True) if num_tokens == min_tokens]
        turn, member = min([(last_chosen[name], name) for name in idlest_members])
        return base + min_tokens, min_tokens, turn, member, num_cached
