"""The frozen shapes of the KV memory: its settings, and the pictures it gives of itself. No behaviour."""

from dataclasses import dataclass
from math import inf

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVMemoryConfig:
    """Sizes and limits of one KV memory, fixed at start."""

    num_blocks: int
    """Blocks that can be handed out. The runner has one more: the null block, 0."""
    block_size: int = 32
    """Tokens in a block; a power of two."""
    pin_share: float = 0.0
    """The largest share of the pool that pins may hold. It is kept free of longest requests, so it is nothing unless
    there may be pins."""
    max_pin_s: float = 3600.0
    """The longest time one pin may last."""
    max_pins: int = 4096
    """How many pins there may be at once, however few blocks they hold."""
    num_evictions_remembered: int = 16_384
    """How many evicted blocks can still be distinguished from blocks never seen."""

    num_slots: int = 0
    """Slots for recurrent state that can be handed out; none for a model without such layers. The runner has one more:
    slot 0, the state before the first token."""
    num_running_slots: int = 0
    """Of those, how many no pin and no kept state may take: one for each sequence that runs, and one for the next."""

    def __post_init__(self) -> None:
        for name, is_fitting, rule in (
            ("num_blocks", self.num_blocks >= 1, "of at least 1"),
            (
                "block_size",
                self.block_size >= 1 and not self.block_size & (self.block_size - 1),
                "to be a power of two",
            ),
            ("pin_share", 0.0 <= self.pin_share <= 1.0, "between 0 and 1"),
            ("max_pin_s", 0.0 < self.max_pin_s < inf, "above 0 and finite"),
            ("max_pins", self.max_pins >= 0, "of at least 0"),
            ("num_evictions_remembered", self.num_evictions_remembered >= 1, "of at least 1"),
        ):
            if not is_fitting:
                raise ConfigError(f"expected {name} {rule}, got {getattr(self, name)}", code=f"invalid_{name}")
        if not min(1, max(0, self.num_slots)) <= self.num_running_slots <= self.num_slots:
            raise ConfigError(
                f"expected at least 1 and at most all of {self.num_slots} state slots for running sequences, got "
                f"{self.num_running_slots}"
            )

    @property
    def pin_budget_blocks(self) -> int:
        """How many blocks pins may hold."""
        return int(self.num_blocks * self.pin_share)


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """A picture of the memory. `hit_tokens` and `query_tokens` count a table once, when it uses what it found."""

    num_blocks: int
    num_referenced_blocks: int
    num_cached_blocks: int
    num_blank_blocks: int
    num_named_blocks: int
    num_pinned_blocks: int
    num_open_tables: int
    query_tokens: int
    hit_tokens: int
    num_evictions: int
    num_block_copies: int
    num_collisions: int
    num_slots: int
    num_cached_slots: int
    """Slots whose states can be hit; of the others some are running, some blank."""
    num_slot_evictions: int
    usage: float
    """Share of the pool that is referenced, 0 to 1."""
