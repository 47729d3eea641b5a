"""A clock that never goes back, made of one that may: whoever waits keeps what it was told.

told       1.0  2.0  3.0   -50.0  -49.0  -48.0
own        1.0  2.0  3.0     3.0    4.0    5.0
"""


class OwnClock:
    """Counts what the other counts forwards, and stands still while that goes back."""

    __slots__ = ("_behind_s", "_last_s")

    def __init__(self) -> None:
        self._last_s = float("-inf")
        self._behind_s = 0.0

    def at(self, now_s: float) -> float:
        """The own time at this moment of the other clock."""
        if now_s < self._last_s:
            self._behind_s += self._last_s - now_s
        self._last_s = now_s
        return now_s + self._behind_s
