"""Routing policies of a simulated gateway. Each gateway has the router of a real fleet, which records members, blocks
and loads. quire's own policy is the choice of this router; the other policies exist only for comparison.

    cost          k x uncached tokens + uncached tokens in flight (`quire.fleet.routing.router`)
    random        a random member
    round-robin   all members in turn
    least-loaded  the member with the fewest tokens in flight, regardless of its cache
    session       by a hash of the beginning of the prompt
    sticky        the member with the longest cached prefix, unless it is overloaded
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import count
from random import Random

from quire.fleet.routing.router import RoutedPrompt, Router, RoutingChoice

SESSION_BLOCKS = 2
"""Number of leading blocks that identify a conversation; the first alone may be a shared system prompt."""
STICKY_TOKENS = 131_072
"""A member with at least this many tokens in flight counts as overloaded."""


class Policy:
    """quire's own policy: the router chooses."""

    needs_block_hashes = True
    """Whether the policy needs block hashes."""

    def __init__(self, router: Router, random: Random) -> None:
        self._router = router
        self._random = random

    def choose(self, prompt: RoutedPrompt, now_s: float) -> RoutingChoice | None:
        """Assign the request to a ready member; None if no member is ready."""
        return self._router.choose(prompt, now_s)


class ComparedPolicy(Policy, ABC):
    """A policy that chooses by itself; the router only records the choice."""

    needs_block_hashes = False

    def choose(self, prompt: RoutedPrompt, now_s: float) -> RoutingChoice | None:
        ready = self._router.membership.ready_members
        if not ready:
            return None
        member, num_cached = self.pick(sorted(ready), prompt)
        choice = RoutingChoice(member, ready[member].epoch, num_cached, 0.0)
        self._router.assign(prompt, choice, now_s)
        return choice

    @abstractmethod
    def pick(self, ready: Sequence[str], prompt: RoutedPrompt) -> tuple[str, int]:
        """Pick a member from `ready`, which is sorted. Returns it and its expected number of cached prompt tokens."""


class RandomPolicy(ComparedPolicy):
    """Picks a random member."""

    def pick(self, ready: Sequence[str], prompt: RoutedPrompt) -> tuple[str, int]:
        return self._random.choice(ready), 0


class RoundRobinPolicy(ComparedPolicy):
    """Picks the members in turn."""

    def __init__(self, router: Router, random: Random) -> None:
        super().__init__(router, random)
        self._turn = count()

    def pick(self, ready: Sequence[str], prompt: RoutedPrompt) -> tuple[str, int]:
        return ready[next(self._turn) % len(ready)], 0


class SessionPolicy(ComparedPolicy):
    """Picks by the beginning of the prompt: equal beginnings get the same member while the set of members is stable."""

    needs_block_hashes = True

    def pick(self, ready: Sequence[str], prompt: RoutedPrompt) -> tuple[str, int]:
        # Rendezvous hashing: when a member leaves, only that member's conversations move.
        beginnings = [names[:SESSION_BLOCKS] for names in prompt.names.values()]
        return max(ready, key=lambda member: Random(f"{beginnings} {int(member)}").random()), 0


class LeastLoadedPolicy(ComparedPolicy):
    """Picks the member with the fewest prompt tokens in flight."""

    def pick(self, ready: Sequence[str], prompt: RoutedPrompt) -> tuple[str, int]:
        return min(ready, key=self._router.loads.in_flight_tokens.__getitem__), 0


class StickyPolicy(LeastLoadedPolicy):
    """Picks the member with the longest cached prefix, unless it is overloaded; otherwise the least loaded member."""

    needs_block_hashes = True

    def pick(self, ready: Sequence[str], prompt: RoutedPrompt) -> tuple[str, int]:
        ((block_size, hashes),) = prompt.names.items()
        depths, in_flight = self._router.index.depths(hashes), self._router.loads.in_flight_tokens
        candidates = [member for member in ready if in_flight[member] < STICKY_TOKENS]
        best = max(candidates, key=lambda member: depths.get(member, 0), default="")
        if best not in depths:
            return super().pick(ready, prompt)
        return best, depths[best] * block_size


POLICIES: Mapping[str, type[Policy]] = {
    "cost": Policy,
    "random": RandomPolicy,
    "round-robin": RoundRobinPolicy,
    "least-loaded": LeastLoadedPolicy,
    "session": SessionPolicy,
    "sticky": StickyPolicy,
}
