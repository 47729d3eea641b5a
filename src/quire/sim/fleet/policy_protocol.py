"""The interface between a simulated fleet and the routing policy of a gateway."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import NamedTuple

from quire.fleet.routing.block_index import BlockIndex
from quire.fleet.routing.router import RoutedPrompt


class Sent(NamedTuple):
    """The chosen member, and the gateway's estimate of tokens to compute there."""

    member: int
    num_uncached_tokens: int


class Policy(ABC):
    """The routing policy of one gateway. It receives the events that a real gateway would."""

    wants_names = False
    """Whether it needs block names."""

    def __init__(self) -> None:
        self.index = BlockIndex()
        """Ignores events of members that did not join it."""

    @abstractmethod
    def choose(self, prompt: RoutedPrompt, now_s: float) -> Sent | None:
        """A member that takes new work, or None if there is none."""

    @abstractmethod
    def joined(self, member: int, now_s: float) -> None:
        """The member takes work from now on, with an empty cache."""

    @abstractmethod
    def draining(self, member: int) -> None:
        """The member takes no new work."""

    @abstractmethod
    def left(self, member: int) -> None:
        """The member is gone; its requests are routed again."""

    def computed(self, name: str) -> None:  # noqa: B027 - ignored, unless a policy needs it
        """The request's prompt is computed."""

    def ended(self, name: str) -> None:  # noqa: B027
        """The request ended there."""

    def stored(self, member: int, names: Sequence[int]) -> None:
        """The member stored these blocks."""
        self.index.stored(key_of(member), names)

    def removed(self, member: int, names: Sequence[int]) -> None:
        """The member removed these blocks."""
        self.index.removed(key_of(member), names)

    def cleared(self, member: int) -> None:
        """The member cleared its cache."""
        self.index.cleared(key_of(member))

    def reported(self, member: int, num_tokens: int, as_of_s: float, num_gateways: int) -> None:  # noqa: B027
        """A load report: tokens in flight at that moment, from so many gateways."""

    @abstractmethod
    def watch(self, suspect_after_s: float) -> None:
        """Expect heartbeats from now on; a member without one for so long is silent."""

    @abstractmethod
    def beat(self, member: int, now_s: float) -> None:
        """A heartbeat of the member."""

    @abstractmethod
    def silent(self, now_s: float) -> Sequence[int]:
        """Members that became silent since the last call: they get no more work."""

    @abstractmethod
    def check(self, names: Collection[str]) -> None:
        """Raise InvariantError if an invariant is violated. `names` are the gateway's requests on members."""


MakePolicy = Callable[[Random], Policy]
"""Makes a policy with one gateway's random generator."""


def key_of(member: int) -> str:
    """Its name in an index, a router and their loads."""
    return f"{member:05}"
