"""How a simulated gateway chooses. One policy is quire's own, with the router that a fleet uses; the others are what it
is compared with, and exist nowhere else.

    cost          k x uncached tokens + uncached tokens in flight (`fleet.choice`)
    random        anybody
    round-robin   the next one
    least-loaded  who has the fewest tokens in flight, whatever is cached
    session       by the beginning of the prompt, wherever that leads
    sticky        who holds most of the prompt, until so much waits there
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from random import Random
from typing import NamedTuple, Protocol

from quire.fleet.choice import RoutedPrompt, Router
from quire.fleet.index import BlockIndex
from quire.fleet.load import MemberLoads
from quire.fleet.membership import Membership

SESSION_BLOCKS = 2
"""Blocks that tell conversations apart: the first may be a system prompt that all share."""
NEVER_S = 1e18
STICKY_TOKENS = 131_072
"""In flight at a member, from which on the next best is taken."""


class Sent(NamedTuple):
    """Where a request goes, and what its gateway believes is to be computed there."""

    member: int
    num_uncached_tokens: int


class Policy(Protocol):
    """One gateway's choices. It hears of members what a real gateway would."""

    wants_names: bool
    """Whether it asks who holds what."""

    def choose(self, prompt: RoutedPrompt, now_s: float) -> Sent | None:
        """A member that takes new work, or None if there is none."""
        ...

    def joined(self, member: int, now_s: float) -> None:
        """It takes work from now on, with an empty cache."""
        ...

    def draining(self, member: int) -> None:
        """It takes no new work."""
        ...

    def left(self, member: int) -> None:
        """It is gone; what it had is chosen for again."""
        ...

    def computed(self, name: str) -> None:
        """The request's prompt is computed."""
        ...

    def ended(self, name: str) -> None:
        """The request ended there."""
        ...

    def stored(self, member: int, names: Sequence[int]) -> None:
        """It holds these blocks."""
        ...

    def removed(self, member: int, names: Sequence[int]) -> None:
        """It holds these no more."""
        ...

    def cleared(self, member: int) -> None:
        """It holds nothing."""
        ...

    def reported(self, member: int, num_tokens: int, as_of_s: float) -> None:
        """So many tokens were in flight there at that moment."""
        ...


MakePolicy = Callable[[Random], Policy]
"""By the dice of one gateway."""


class CostPolicy:
    """quire's own router."""

    wants_names = True

    def __init__(self, block_size: int, random: Random) -> None:
        self._block_size = block_size
        # Who dies is told by the simulation: nobody beats there.
        membership = Membership(suspect_after_s=NEVER_S, gone_after_s=NEVER_S)
        self.router = Router(membership, salt=str(random.getrandbits(32)))
        self._is_there: set[int] = set()

    def choose(self, prompt: RoutedPrompt, now_s: float) -> Sent | None:
        """See `Policy`."""
        self.router.advance(now_s)
        chosen = self.router.choose(prompt, now_s)
        return None if chosen is None else Sent(int(chosen.member), prompt.num_tokens - chosen.num_cached_tokens)

    def joined(self, member: int, now_s: float) -> None:
        """See `Policy`."""
        self.router.join(_key(member), self._block_size, now_s)
        self.router.ready(_key(member), now_s)
        self._is_there.add(member)

    def draining(self, member: int) -> None:
        """See `Policy`."""
        for transition in self.router.drain(_key(member)):
            if transition.after.name == "GONE":
                self._is_there.discard(member)

    def left(self, member: int) -> None:
        """See `Policy`."""
        if member in self._is_there:
            self._is_there.discard(member)
            self.router.leave(_key(member))

    def computed(self, name: str) -> None:
        """See `Policy`."""
        self.router.computed(name)

    def ended(self, name: str) -> None:
        """See `Policy`."""
        for transition in self.router.ended(name):
            if transition.after.name == "GONE":
                self._is_there.discard(int(transition.member))

    def stored(self, member: int, names: Sequence[int]) -> None:
        """See `Policy`."""
        if member in self._is_there:
            self.router.index.stored(_key(member), names)

    def removed(self, member: int, names: Sequence[int]) -> None:
        """See `Policy`."""
        if member in self._is_there:
            self.router.index.removed(_key(member), names)

    def cleared(self, member: int) -> None:
        """See `Policy`."""
        if member in self._is_there:
            self.router.index.cleared(_key(member))

    def reported(self, member: int, num_tokens: int, as_of_s: float) -> None:
        """See `Policy`."""
        self.router.loads.report(_key(member), num_tokens, as_of_s)


class _Listed:
    """Chooses among those who are there, in their order, and hears nothing else."""

    wants_names = False

    def __init__(self) -> None:
        self.there: list[int] = []

    def computed(self, name: str) -> None:
        """Not heard."""

    def ended(self, name: str) -> None:
        """Not heard."""

    def stored(self, member: int, names: Sequence[int]) -> None:
        """Not heard."""

    def removed(self, member: int, names: Sequence[int]) -> None:
        """Not heard."""

    def cleared(self, member: int) -> None:
        """Not heard."""

    def reported(self, member: int, num_tokens: int, as_of_s: float) -> None:
        """Not heard."""

    def joined(self, member: int, now_s: float) -> None:
        """See `Policy`."""
        self.there = sorted({*self.there, member})

    def draining(self, member: int) -> None:
        """See `Policy`."""
        self.left(member)

    def left(self, member: int) -> None:
        """See `Policy`."""
        self.there = [one for one in self.there if one != member]


class RandomPolicy(_Listed):
    """Anybody."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def choose(self, prompt: RoutedPrompt, now_s: float) -> Sent | None:
        """See `Policy`."""
        return Sent(self._random.choice(self.there), prompt.num_tokens) if self.there else None


class RoundRobinPolicy(_Listed):
    """The next one."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = count()

    def choose(self, prompt: RoutedPrompt, now_s: float) -> Sent | None:
        """See `Policy`."""
        return Sent(self.there[next(self._turn) % len(self.there)], prompt.num_tokens) if self.there else None


class SessionPolicy(_Listed):
    """By the beginning of the prompt: whoever begins alike goes to the same member, as long as members stay."""

    wants_names = True

    def choose(self, prompt: RoutedPrompt, now_s: float) -> Sent | None:
        """See `Policy`."""
        if not self.there:
            return None
        # Rendezvous hashing: when a member leaves, only its own conversations move.
        begun = [names[:SESSION_BLOCKS] for names in prompt.names.values()]
        chosen = max(self.there, key=lambda member: Random(f"{begun} {member}").random())
        return Sent(chosen, prompt.num_tokens)


class LeastLoadedPolicy(_Listed):
    """Who has the fewest prompt tokens in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = MemberLoads()

    def choose(self, prompt: RoutedPrompt, now_s: float) -> Sent | None:
        """See `Policy`."""
        if not self.there:
            return None
        chosen = min(self.there, key=lambda member: (self.loads.in_flight_tokens[_key(member)], member))
        self.loads.reserve(prompt.request_id, _key(chosen), prompt.num_tokens, now_s)
        return Sent(chosen, prompt.num_tokens)

    def joined(self, member: int, now_s: float) -> None:
        """See `Policy`."""
        super().joined(member, now_s)
        self.loads.join(_key(member))

    def draining(self, member: int) -> None:
        """See `Policy`."""
        super().left(member)

    def left(self, member: int) -> None:
        """See `Policy`."""
        super().left(member)
        self.loads.leave(_key(member))

    def computed(self, name: str) -> None:
        """See `Policy`."""
        self.loads.release(name)

    def ended(self, name: str) -> None:
        """See `Policy`."""
        self.loads.release(name)

    def reported(self, member: int, num_tokens: int, as_of_s: float) -> None:
        """See `Policy`."""
        self.loads.report(_key(member), num_tokens, as_of_s)


class StickyPolicy(LeastLoadedPolicy):
    """Who holds most of the prompt, unless too much waits there; else the least loaded."""

    wants_names = True

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self._block_size = block_size
        self._index = BlockIndex()

    def choose(self, prompt: RoutedPrompt, now_s: float) -> Sent | None:
        """See `Policy`."""
        self._index.sweep(now_s)
        names = prompt.names.get(self._block_size, ())
        depths = self._index.depths(names)
        held = [one for one in self.there if self.loads.in_flight_tokens[_key(one)] < STICKY_TOKENS]
        best = max(held, key=lambda one: (depths.get(_key(one), 0), -one), default=None)
        if best is None or not depths.get(_key(best), 0):
            sent = super().choose(prompt, now_s)
        else:
            self.loads.reserve(prompt.request_id, _key(best), prompt.num_tokens, now_s)
            sent = Sent(best, prompt.num_tokens - depths[_key(best)] * self._block_size)
        if sent is not None:
            self._index.optimistic(_key(sent.member), names, now_s)
        return sent

    def joined(self, member: int, now_s: float) -> None:
        """See `Policy`."""
        super().joined(member, now_s)
        self._index.join(_key(member))

    def left(self, member: int) -> None:
        """See `Policy`."""
        super().left(member)
        self._index.leave(_key(member))

    def stored(self, member: int, names: Sequence[int]) -> None:
        """See `Policy`."""
        if _key(member) in self._index.members:
            self._index.stored(_key(member), names)

    def removed(self, member: int, names: Sequence[int]) -> None:
        """See `Policy`."""
        if _key(member) in self._index.members:
            self._index.removed(_key(member), names)

    def cleared(self, member: int) -> None:
        """See `Policy`."""
        if _key(member) in self._index.members:
            self._index.cleared(_key(member))


def make_policy(name: str, block_size: int) -> MakePolicy:
    """By its name."""
    return POLICIES[name](block_size)


POLICIES: Mapping[str, Callable[[int], MakePolicy]] = {
    "cost": lambda block_size: lambda random: CostPolicy(block_size, random),
    "random": lambda _size: RandomPolicy,
    "round-robin": lambda _size: lambda _random: RoundRobinPolicy(),
    "least-loaded": lambda _size: lambda _random: LeastLoadedPolicy(),
    "session": lambda _size: lambda _random: SessionPolicy(),
    "sticky": lambda block_size: lambda _random: StickyPolicy(block_size),
}


def _key(member: int) -> str:
    return f"{member:05}"
