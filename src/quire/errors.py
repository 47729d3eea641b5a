"""Every exception quire raises on purpose. Importable by all rooms; imports nothing.

    QuireError
    ├── InvariantError            a bug in quire: a promise of the design does not hold
    ├── ConfigError               a setting breaks a rule; said before anything starts
    └── CapacityError             something bounded is full
        ├── OutOfBlocksError      the pool has fewer free blocks than the step needs
        └── PinBudgetError        the pin would hold more of the pool than pins may

A bug raises `InvariantError`, never `assert`, because `python -O` strips assertions and a memory that lies
must stop in production too. Everything else is the world being the world, and is handled where it is caught.
"""


class QuireError(Exception):
    """The root: `except QuireError` catches all that quire raises on purpose."""


class InvariantError(QuireError):
    """A promise of the design does not hold. Not handled: the worker is replaced."""


class ConfigError(QuireError, ValueError):
    """A setting breaks a rule. The message says the rule, the value given, and what to do."""


class CapacityError(QuireError):
    """Something bounded is full."""


class OutOfBlocksError(CapacityError):
    """The pool has fewer free blocks than were asked for. Nothing has been changed."""

    def __init__(self, num_needed: int, num_free: int) -> None:
        super().__init__(f"{num_needed} blocks are needed and {num_free} are free; preempt or finish a sequence first")
        self.num_needed = num_needed
        self.num_free = num_free


class PinBudgetError(CapacityError):
    """A pin would hold more blocks than the pin budget allows. Nothing has been pinned."""

    def __init__(self, num_pinned: int, num_asked: int, budget: int) -> None:
        super().__init__(
            f"pins may hold {budget} blocks, {num_pinned} are pinned and this pin would add {num_asked}; "
            "unpin something, or raise pin_share"
        )
        self.num_pinned = num_pinned
        self.num_asked = num_asked
        self.budget = budget
