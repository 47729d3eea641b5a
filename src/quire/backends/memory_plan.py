"""The memory plan: what fits into the budget, decided before the first request and never changed.

    budget  =  resident bytes after loading  +  peak of a step  +  the KV pool  +  state slots

The first term is read from the operating system, the second is measured by running the worst step that the settings
allow, and the pool and the state slots get the rest. All terms are resident memory of the whole process, libraries
included. Only models with recurrent layers need state slots: one for each running sequence, and more to cache states.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import MEMORY_SHARE, ModelSettings
from quire.config.machine import share_of_memory_bytes
from quire.errors import ConfigError

MARGIN_SHARE = 0.02
"""Share of the budget left unused, for allocator overhead and measurement error."""
MARGIN_BYTES = 32 << 20
LIBRARY_BYTES = 64 << 20
"""Minimum memory of library threads and generated code once matrix products run."""
GIB = 1 << 30
LEAST_SLOTS = 3
"""Minimum number of state slots: one running, one for the next sequence, one cached."""
KEPT_PER_RUNNING = 4
"""Cached states per running sequence: of its conversation, of its prompt, and of prefixes shared with other sequences.
"""
STATE_SHARE = 0.5
"""Share of the remaining memory that state slots may use; they get more only if blocks have no use for the rest."""


@dataclass(frozen=True, slots=True)
class PoolBytes:
    """Bytes per block and bytes per state slot; 0 if the model has no recurrent layers."""

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
    """The setting, or less if there are too few state slots."""
    num_slots: int = 0
    slot_bytes: int = 0

    @property
    def states(self) -> str:
        """Text on the number and use of state slots, starting with a comma; empty if there are none."""
        if not self.num_slots:
            return ""
        num_kept = self.num_slots - self.max_running - 1
        return (
            f", states {_gib(self.num_slots * self.slot_bytes)} = {self.max_running} running and {num_kept} kept of "
            f"{self.slot_bytes / (1 << 20):.1f} MiB"
        )

    @property
    def line(self) -> str:
        num_tokens = self.num_blocks * self.block_size
        each = min(num_tokens // self.max_running, self.max_sequence_tokens)
        longest = max(1, num_tokens // self.max_sequence_tokens)
        return (
            f"memory {_gib(self.budget_bytes)}: model and libraries {_gib(self.loaded_bytes)}, steps "
            f"{_gib(self.step_bytes)}, KV {_gib(self.num_blocks * self.block_bytes)} = {self.num_blocks:,} blocks of "
            f"{self.block_size} = {num_tokens:,} tokens: {min(longest, self.max_running)} sequences of "
            f"{self.max_sequence_tokens:,} or {self.max_running} of {each:,}{self.states}"
        )


def budget(settings: ModelSettings) -> int:
    """Return the memory budget of this process in bytes."""
    if settings.memory_bytes is not None:
        return settings.memory_bytes
    return share_of_memory_bytes(MEMORY_SHARE)


def check_weights_fit(budget_bytes: int, weight_bytes: int, largest_bytes: int, logit_bytes: int) -> None:
    """Raise ConfigError before reading gigabytes if the model cannot fit: current memory, the weights, the largest
    weight a second time while it is packed, and the logits of the largest step."""
    least = resident_bytes() + weight_bytes + largest_bytes + logit_bytes + LIBRARY_BYTES
    if least > budget_bytes:
        raise ConfigError(
            f"expected a memory budget that holds the model, at least {_gib(least)} with libraries, got "
            f"{_gib(budget_bytes)}; raise it to {_gib(int(least * 1.25))} or choose a smaller model",
            code="weights_exceed_memory",
        )


def model_tokens(config: Mapping[str, Any]) -> int:
    """Return the context length of the model according to its config; 2048 if the config has none."""
    for fields in (config, config.get("text_config")):
        tokens = (
            fields.get("max_position_embeddings", fields.get("n_positions")) if isinstance(fields, Mapping) else None
        )
        if isinstance(tokens, int) and tokens >= 1:
            return tokens
    return 2048


def decide(
    settings: ModelSettings, budget_bytes: int, loaded_bytes: int, step_bytes: int, each: PoolBytes, most_tokens: int
) -> MemoryPlan:
    """Divide the rest of the budget: first state slots, then as many blocks as fit, at most as many as all running
    sequences can use. Raises ConfigError if too few fit."""
    rest = int(budget_bytes * (1 - MARGIN_SHARE)) - MARGIN_BYTES - loaded_bytes - step_bytes
    wanted_tokens = min(settings.max_sequence_tokens or most_tokens, most_tokens)
    useful = settings.max_running * -(-wanted_tokens // settings.block_size)
    required_tokens = 1 if settings.max_sequence_tokens is None else wanted_tokens  # none beyond the model's context
    least = max(2, -(-required_tokens // settings.block_size))
    num_slots = slots_within(rest, each, settings.max_running, useful, least)
    max_running = _running_with(num_slots, settings.max_running) if each.slot else settings.max_running
    rest -= (num_slots + 1) * each.slot
    # The null block needs memory too.
    num_blocks = min(rest // each.block - 1, useful)
    if num_blocks < least or (each.slot and num_slots < LEAST_SLOTS):
        needed = loaded_bytes + step_bytes + (least + 1) * each.block + (LEAST_SLOTS + 1) * each.slot
        raise ConfigError(
            f"expected a memory budget that holds model, steps and {least} blocks{_and_slots(each)}, {_gib(needed)} in "
            f"all, got {_gib(budget_bytes)}; raise it to {_gib(int(needed * 1.1) + MARGIN_BYTES)}, or lower "
            "max_step_tokens or max_sequence_tokens"
        )
    longest = min(wanted_tokens, num_blocks * settings.block_size)
    return MemoryPlan(
        budget_bytes, loaded_bytes, step_bytes, num_blocks, each.block, settings.block_size, longest, max_running,
        num_slots, each.slot,
    )  # fmt: skip


def slots_within(rest: int, each: PoolBytes, max_running: int, useful: int, least: int) -> int:
    """Return the number of state slots, without slot 0, if at most `useful` and at least `least` blocks are needed."""
    if not each.slot:
        return 0

    def beside(num_blocks: int) -> int:
        return (rest - (num_blocks + 1) * each.block) // each.slot - 1

    room = max(int(rest * STATE_SHARE) // each.slot - 1, beside(useful), LEAST_SLOTS)
    return max(0, min(room, beside(least), (1 + KEPT_PER_RUNNING) * max_running + 1))


def _running_with(num_slots: int, max_running: int) -> int:
    """If slots are few, reserve half for cached states: a sequence without a cached state recomputes everything."""
    return max(1, min(max_running, (num_slots - 1) // 2))


def _and_slots(each: PoolBytes) -> str:
    return f" and {LEAST_SLOTS} state slots of {_gib(each.slot)}" if each.slot else ""


def resident_bytes() -> int:
    """Return the current resident memory of the process."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Return the peak resident memory of the process since `forget_peak`."""
    return _status_bytes("VmHWM")


def forget_peak() -> None:
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
