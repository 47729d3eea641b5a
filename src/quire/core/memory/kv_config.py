"""Settings, counters and statistics of the KV memory. Plain data."""

from dataclasses import dataclass
from math import inf

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVMemoryConfig:
    """Sizes and limits of one KV memory, fixed at start."""

    num_blocks: int
    """Number of blocks that can be allocated. The runner has one more: block 0, the null block (`block_pool`)."""
    block_size: int = 32
    """Tokens in a block; a power of two."""
    pin_share: float = 0.25
    """Largest fraction of the pool that pins may use. Pins yield to a request that could not finish otherwise."""
    max_pin_s: float = 12 * 3600.0
    """Longest lifetime of a pin."""
    max_pins: int = 4096
    """Maximum number of pins, regardless of their size."""
    num_evictions_remembered: int = 16_384
    """Number of evicted digests to remember, so that a miss can be reported as `EVICTED` and not as `FIRST_SEEN`."""

    num_slots: int = 0
    """Slots for recurrent state; 0 for a model without recurrent layers. The runner has one more: slot 0, the state
    before the first token."""
    num_running_slots: int = 0
    """How many of the slots are reserved for running sequences: one for each, and one for the next to start. Pinned
    and reserved states (`state_slots`) cannot use them."""

    def __post_init__(self) -> None:
        for name, is_valid, requirement in (
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
            if not is_valid:
                raise ConfigError(f"expected {name} {requirement}, got {getattr(self, name)}", code=f"invalid_{name}")
        if not min(1, max(0, self.num_slots)) <= self.num_running_slots <= self.num_slots:
            raise ConfigError(
                f"expected at least 1 and at most all of {self.num_slots} state slots for running sequences, got "
                f"{self.num_running_slots}"
            )

    @property
    def pin_budget_blocks(self) -> int:
        """Maximum number of blocks that pins may hold."""
        return int(self.num_blocks * self.pin_share)


@dataclass(slots=True)
class MemoryCounters:
    """Totals since the start."""

    query_tokens: int = 0  # tokens of prompts that were looked up
    hit_tokens: int = 0  # those found in the cache
    num_evictions: int = 0
    num_block_copies: int = 0  # of shared or named, partly filled blocks
    num_collisions: int = 0  # blocks not named, because another has their digest


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """A snapshot of the memory. `hit_tokens` and `query_tokens` count a lookup when its table next reserves blocks."""

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
    num_pins_yielded: int
    num_slots: int
    num_cached_slots: int
    """Number of slots with a cached state; the other slots are running, reserved or blank (`state_slots`)."""
    num_slot_evictions: int
    usage: float
    """Fraction of the pool that is referenced, 0 to 1."""
