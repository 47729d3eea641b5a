"""The memory plan: what fits into the budget, decided before the first request and never changed.

    budget  =  resident bytes after loading  +  peak of a step  +  the KV pool  +  state slots

The first term is read from the operating system, the second is measured by running the worst step that the settings
allow, and the KV pool (the blocks) and the state slots get the rest. All terms are resident memory of the process,
libraries included. Only models with recurrent layers need state slots: for running sequences and for cached states.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import MEMORY_SHARE, ModelSettings
from quire.config.machine import memory_budget_bytes
from quire.errors import ConfigError

MARGIN_SHARE = 0.02
"""Share of the budget left unused, for allocator overhead and measurement error."""
MARGIN_BYTES = 32 << 20
LIBRARY_BYTES = 64 << 20
"""Minimum memory of library threads and generated code once matrix products run."""
GIB = 1 << 30
MIN_SLOTS = 3
"""Minimum number of state slots: one running, one for the next sequence, one cached."""
CACHED_PER_RUNNING = 4
"""Cached states per running sequence: for its conversation, its prompt, and prefixes shared with others."""
STATE_SHARE = 0.5
"""Share of the remaining memory that state slots may use; more only if blocks cannot use the rest."""


@dataclass(frozen=True, slots=True)
class PoolBytes:
    """Bytes per KV block, and bytes per state slot (0 if the model has no recurrent layers)."""

    block: int
    slot: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The division of the memory budget, and the limits that follow from it."""

    budget_bytes: int
    loaded_bytes: int
    step_bytes: int
    num_blocks: int
    block_bytes: int
    block_size: int
    max_sequence_tokens: int
    max_running: int
    """The setting `max_running`, or less if there are too few state slots."""
    num_slots: int = 0
    slot_bytes: int = 0

    @property
    def states(self) -> str:
        """The state slots as a part of `summary`, starting with a comma; empty if there are none."""
        if not self.num_slots:
            return ""
        num_cached = self.num_slots - self.max_running - 1
        return (
            f", states {_gib(self.num_slots * self.slot_bytes)} = {self.max_running} running and {num_cached} cached, "
            f"each {self.slot_bytes / (1 << 20):.1f} MiB"
        )

    @property
    def summary(self) -> str:
        num_tokens = self.num_blocks * self.block_size
        num_tokens_each = min(num_tokens // self.max_running, self.max_sequence_tokens)
        num_longest = max(1, num_tokens // self.max_sequence_tokens)
        return (
            f"memory {_gib(self.budget_bytes)}: model and libraries {_gib(self.loaded_bytes)}, steps "
            f"{_gib(self.step_bytes)}, KV {_gib(self.num_blocks * self.block_bytes)} = {self.num_blocks:,} blocks of "
            f"{self.block_size} = {num_tokens:,} tokens: {min(num_longest, self.max_running)} sequences of "
            f"{self.max_sequence_tokens:,} or {self.max_running} of {num_tokens_each:,}{self.states}"
        )


def budget(settings: ModelSettings) -> int:
    """Return the memory budget of this process in bytes."""
    if settings.memory_bytes is not None:
        return settings.memory_bytes
    return memory_budget_bytes(MEMORY_SHARE)


def check_weights_fit(budget_bytes: int, weight_bytes: int, largest_bytes: int, logit_bytes: int) -> None:
    """Raise ConfigError, before gigabytes are read, if the budget is smaller than the sum of the current memory, the
    weights, the largest weight again (while packed), and the logits of the largest step."""
    min_bytes = resident_bytes() + weight_bytes + largest_bytes + logit_bytes + LIBRARY_BYTES
    if min_bytes > budget_bytes:
        raise ConfigError(
            f"expected a memory budget of at least {_gib(min_bytes)} for the model and libraries, got "
            f"{_gib(budget_bytes)}; raise it to {_gib(int(min_bytes * 1.25))} or choose a smaller model",
            code="weights_exceed_memory",
        )


def model_tokens(config: Mapping[str, Any]) -> int:
    """Return the context length of the model according to its config; 2048 if the config has none."""
    for fields in (config, config.get("text_config")):
        num_tokens = (
            fields.get("max_position_embeddings", fields.get("n_positions")) if isinstance(fields, Mapping) else None
        )
        if isinstance(num_tokens, int) and num_tokens >= 1:
            return num_tokens
    return 2048


def decide(
    settings: ModelSettings, budget_bytes: int, loaded_bytes: int, step_bytes: int, pool: PoolBytes, model_limit: int
) -> MemoryPlan:
    """Divide the rest of the budget: first state slots, then as many blocks as fit, at most as many as all running
    sequences can use. `model_limit` is the model's context length. Raises ConfigError if one sequence does not fit."""
    rest_bytes = int(budget_bytes * (1 - MARGIN_SHARE)) - MARGIN_BYTES - loaded_bytes - step_bytes
    sequence_tokens = min(settings.max_sequence_tokens or model_limit, model_limit)
    max_blocks = settings.max_running * -(-sequence_tokens // settings.block_size)
    required_tokens = 1 if settings.max_sequence_tokens is None else sequence_tokens  # at most the model's context
    min_blocks = max(2, -(-required_tokens // settings.block_size))
    num_slots = num_slots_within(rest_bytes, pool, settings.max_running, max_blocks, min_blocks)
    max_running = _running_with(num_slots, settings.max_running) if pool.slot else settings.max_running
    rest_bytes -= (num_slots + 1) * pool.slot
    # The null block needs memory too.
    num_blocks = min(rest_bytes // pool.block - 1, max_blocks)
    if num_blocks < min_blocks or (pool.slot and num_slots < MIN_SLOTS):
        min_bytes = loaded_bytes + step_bytes + (min_blocks + 1) * pool.block + (MIN_SLOTS + 1) * pool.slot
        raise ConfigError(
            f"expected a memory budget of at least {_gib(min_bytes)} for model, steps and {min_blocks} blocks"
            f"{_and_slots(pool)}, got {_gib(budget_bytes)}; raise it to "
            f"{_gib(int(min_bytes * 1.1) + MARGIN_BYTES)}, or lower max_step_tokens or max_sequence_tokens"
        )
    sequence_tokens = min(sequence_tokens, num_blocks * settings.block_size)
    return MemoryPlan(
        budget_bytes, loaded_bytes, step_bytes, num_blocks, pool.block, settings.block_size, sequence_tokens,
        max_running, num_slots, pool.slot,
    )  # fmt: skip


def num_slots_within(rest_bytes: int, pool: PoolBytes, max_running: int, max_blocks: int, min_blocks: int) -> int:
    """Return the number of state slots, without slot 0; `max_blocks` blocks are useful and `min_blocks` needed."""
    if not pool.slot:
        return 0

    def slots_with(num_blocks: int) -> int:
        return (rest_bytes - (num_blocks + 1) * pool.block) // pool.slot - 1

    max_slots = max(int(rest_bytes * STATE_SHARE) // pool.slot - 1, slots_with(max_blocks), MIN_SLOTS)
    return max(0, min(max_slots, slots_with(min_blocks), (1 + CACHED_PER_RUNNING) * max_running + 1))


def _running_with(num_slots: int, max_running: int) -> int:
    """Return how many sequences may run; if slots are few, half of them are reserved for cached states."""
    return max(1, min(max_running, (num_slots - 1) // 2))


def _and_slots(pool: PoolBytes) -> str:
    return f" and {MIN_SLOTS} state slots of {_gib(pool.slot)}" if pool.slot else ""


def resident_bytes() -> int:
    """Return the current resident memory of the process."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Return the peak resident memory of the process since the last `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Reset the peak of the resident memory, if the operating system allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _status_bytes(name: str) -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource  # noqa: PLC0415 - needed only without /proc

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
