"""What a simulated gateway is asked, and what it is told: the seam between a fleet and whoever chooses in it."""

from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import NamedTuple, Protocol

from quire.fleet.routing.router import RoutedPrompt


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

    def reported(self, member: int, num_tokens: int, as_of_s: float, num_gateways: int) -> None:
        """So many tokens were in flight there at that moment, from so many gateways."""
        ...

    def watch(self, suspect_after_s: float) -> None:
        """Members beat from now on, and who does not for so long is silent."""
        ...

    def beat(self, member: int, now_s: float) -> None:
        """It is alive."""
        ...

    def silent(self, now_s: float) -> Sequence[int]:
        """Who has fallen silent since the last call: they get no more work."""
        ...

    def check(self, names: Collection[str]) -> None:
        """Raise InvariantError if anything is not as it must be. Members have the requests with these names."""
        ...


MakePolicy = Callable[[Random], Policy]
"""By the dice of one gateway."""
