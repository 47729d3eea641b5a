"""Routing policies of a simulated gateway. One is quire's own, with the router of a real fleet; the others exist only
for comparison. Their methods are described in `Policy`.

    cost          k x uncached tokens + uncached tokens in flight (`fleet.choice`)
    random        any member
    round-robin   the next one
    least-loaded  the member with the fewest tokens in flight, whatever is cached
    session       by a hash of the beginning of the prompt
    sticky        the member that holds most of the prompt, unless it is overloaded
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from random import Random

from quire.errors import InvariantError
from quire.fleet.routing.invariants import check_index, check_loads, check_router
from quire.fleet.routing.member_load import MemberLoads
from quire.fleet.routing.membership import GONE_AFTER_S, SUSPECT_AFTER_S, Membership, MemberState
from quire.fleet.routing.router import RoutedPrompt, Router
from quire.sim.fleet.policy_protocol import MakePolicy, Policy, Sent, key_of

SESSION_BLOCKS = 2
"""Blocks that distinguish conversations: the first may be a shared system prompt."""
NEVER_S = 1e18
STICKY_TOKENS = 131_072
"""Tokens in flight from which a member counts as overloaded."""


class CostPolicy(Policy):
    """quire's own router."""

    wants_names = True

    def __init__(self, block_size: int, random: Random) -> None:
        super().__init__()
        self._block_size, self._salt = block_size, str(random.getrandbits(32))
        # The simulation reports deaths itself: there are no heartbeats.
        self._route(Membership(suspect_after_s=NEVER_S, gone_after_s=NEVER_S))

    def _route(self, membership: Membership) -> None:
        self.router = Router(membership, salt=self._salt)
        self.index = self.router.index

    def choose(self, prompt: RoutedPrompt, now_s: float) -> Sent | None:
        self.router.index.sweep(now_s)
        chosen = self.router.choose(prompt, now_s)
        return None if chosen is None else Sent(int(chosen.member), prompt.num_tokens - chosen.num_cached_tokens)

    def joined(self, member: int, now_s: float) -> None:
        self.left(member)  # a suspected member that was not dropped yet may rejoin
        self.router.join(key_of(member), self._block_size, now_s)
        self.router.ready(key_of(member), now_s)

    def draining(self, member: int) -> None:
        self.router.drain(key_of(member))

    def left(self, member: int) -> None:
        if self.router.membership.state_of(key_of(member)) is not MemberState.GONE:
            self.router.leave(key_of(member))

    def computed(self, name: str) -> None:
        self.router.computed(name)

    def ended(self, name: str) -> None:
        self.router.ended(name)

    def reported(self, member: int, num_tokens: int, as_of_s: float, num_gateways: int) -> None:
        self.router.num_gateways = num_gateways
        self.router.loads.report(key_of(member), num_tokens, as_of_s)

    def watch(self, suspect_after_s: float) -> None:
        self._route(Membership(suspect_after_s, suspect_after_s * GONE_AFTER_S / SUSPECT_AFTER_S))

    def beat(self, member: int, now_s: float) -> None:
        self.router.beat(key_of(member), now_s)

    def silent(self, now_s: float) -> Sequence[int]:
        transitions = self.router.advance(now_s)
        return [int(one.member) for one in transitions if one.before is not MemberState.SUSPECT]

    def check(self, names: Collection[str]) -> None:
        check_router(self.router, names)


class _Listed(Policy):
    """Chooses from a sorted list of members; ignores events."""

    def __init__(self) -> None:
        super().__init__()
        self.there: list[int] = []
        self._suspect_after_s = NEVER_S
        self._last_beat_s: dict[int, float] = {}

    def watch(self, suspect_after_s: float) -> None:
        self._suspect_after_s = suspect_after_s

    def beat(self, member: int, now_s: float) -> None:
        self._last_beat_s[member] = now_s

    def silent(self, now_s: float) -> Sequence[int]:
        found = [one for one, beat_s in self._last_beat_s.items() if now_s - beat_s >= self._suspect_after_s]
        for member in found:
            self.left(member)
        return found

    def check(self, names: Collection[str]) -> None:
        if self.there != sorted(set(self.there)) or not self._last_beat_s.keys() >= set(self.there):
            raise InvariantError(f"check: {self.there} receive work, {sorted(self._last_beat_s)} are alive")

    def joined(self, member: int, now_s: float) -> None:
        self.there = sorted({*self.there, member})
        self._last_beat_s[member] = now_s

    def draining(self, member: int) -> None:
        self.there = [one for one in self.there if one != member]

    def left(self, member: int) -> None:
        self.draining(member)
        self._last_beat_s.pop(member, None)


class RandomPolicy(_Listed):
    """A random member."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def choose(self, prompt: RoutedPrompt, now_s: float) -> Sent | None:
        return Sent(self._random.choice(self.there), prompt.num_tokens) if self.there else None


class RoundRobinPolicy(_Listed):
    """The next member in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = count()

    def choose(self, prompt: RoutedPrompt, now_s: float) -> Sent | None:
        return Sent(self.there[next(self._turn) % len(self.there)], prompt.num_tokens) if self.there else None


class SessionPolicy(_Listed):
    """By the beginning of the prompt: equal beginnings go to the same member while the members stay the same."""

    wants_names = True

    def choose(self, prompt: RoutedPrompt, now_s: float) -> Sent | None:
        if not self.there:
            return None
        # Rendezvous hashing: when a member leaves, only its own conversations move.
        begun = [names[:SESSION_BLOCKS] for names in prompt.names.values()]
        chosen = max(self.there, key=lambda member: Random(f"{begun} {member}").random())
        return Sent(chosen, prompt.num_tokens)


class LeastLoadedPolicy(_Listed):
    """The member with the fewest prompt tokens in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = MemberLoads()

    def choose(self, prompt: RoutedPrompt, now_s: float) -> Sent | None:
        if not self.there:
            return None
        chosen = min(self.there, key=lambda member: (self.loads.in_flight_tokens[key_of(member)], member))
        self.loads.reserve(prompt.request_id, key_of(chosen), prompt.num_tokens, now_s)
        return Sent(chosen, prompt.num_tokens)

    def joined(self, member: int, now_s: float) -> None:
        super().joined(member, now_s)
        self.loads.join(key_of(member))

    def left(self, member: int) -> None:
        super().left(member)
        self.loads.leave(key_of(member))

    def check(self, names: Collection[str]) -> None:
        super().check(names)
        check_loads(self.loads)

    def computed(self, name: str) -> None:
        self.loads.release(name)

    ended = computed

    def reported(self, member: int, num_tokens: int, as_of_s: float, num_gateways: int) -> None:
        self.loads.report(key_of(member), num_tokens, as_of_s)


class StickyPolicy(LeastLoadedPolicy):
    """The member that holds most of the prompt, unless it is overloaded; else the least loaded."""

    wants_names = True

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._block_size = block_size

    def choose(self, prompt: RoutedPrompt, now_s: float) -> Sent | None:
        self.index.sweep(now_s)
        names = prompt.names.get(self._block_size, ())
        depths = self.index.depths(names)
        held = [one for one in self.there if self.loads.in_flight_tokens[key_of(one)] < STICKY_TOKENS]
        best = max(held, key=lambda one: (depths.get(key_of(one), 0), -one), default=None)
        if best is None or not depths.get(key_of(best), 0):
            sent = super().choose(prompt, now_s)
        else:
            self.loads.reserve(prompt.request_id, key_of(best), prompt.num_tokens, now_s)
            sent = Sent(best, prompt.num_tokens - depths[key_of(best)] * self._block_size)
        if sent is not None:
            self.index.optimistic(key_of(sent.member), names, now_s)
        return sent

    def joined(self, member: int, now_s: float) -> None:
        super().joined(member, now_s)
        self.index.join(key_of(member))

    def left(self, member: int) -> None:
        super().left(member)
        self.index.leave(key_of(member))

    def check(self, names: Collection[str]) -> None:
        super().check(names)
        check_index(self.index)


def make_policy(name: str, block_size: int) -> MakePolicy:
    """The policy with this name."""
    return POLICIES[name](block_size)


POLICIES: Mapping[str, Callable[[int], MakePolicy]] = {
    "cost": lambda block_size: lambda random: CostPolicy(block_size, random),
    "random": lambda _size: RandomPolicy,
    "round-robin": lambda _size: lambda _random: RoundRobinPolicy(),
    "least-loaded": lambda _size: lambda _random: LeastLoadedPolicy(),
    "session": lambda _size: lambda _random: SessionPolicy(),
    "sticky": lambda block_size: lambda _random: StickyPolicy(block_size),
}
