"""How much fits in how many bytes, decided before the first request and never again.

    budget  =  what the process holds once the model is loaded  +  the most a step takes  +  the KV pool  +  state slots

The first is read from the system, the second measured by running the worst step the settings allow, the others are what
is left. All of it is resident memory of the whole process, libraries included. State slots are for models with
recurrent layers: one for each sequence that runs, and as many as make sense to keep states in.
"""

from dataclasses import dataclass
from pathlib import Path

from quire.config import MEMORY_SHARE, ModelSettings
from quire.config.machine import share_of_memory_bytes
from quire.errors import ConfigError

MARGIN_SHARE = 0.02
"""Left alone for what an allocator keeps and a measurement misses."""
MARGIN_BYTES = 32 << 20
LIBRARY_BYTES = 64 << 20
"""What threads and prepared code of the libraries take at least once products run."""
GIB = 1 << 30
LEAST_SLOTS = 3
"""One that runs, one for the next, one to keep."""
KEPT_PER_RUNNING = 4
"""States worth keeping for each sequence that may run: of its conversation, its prompt, and what others share."""
STATE_SHARE = 0.5
"""Of what is left, states may have as much, and more only if blocks have no use for it."""


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """What is taken before the pools are."""

    loaded: int
    step: int


@dataclass(frozen=True, slots=True)
class PoolBytes:
    """What one block takes, and one state slot; 0: the model has none."""

    block: int
    slot: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the bytes go."""

    budget_bytes: int
    loaded_bytes: int
    step_bytes: int
    num_blocks: int
    block_bytes: int
    block_size: int
    max_sequence_tokens: int
    max_running: int
    """As was asked for, or as many as there are state slots for."""
    num_slots: int = 0
    slot_bytes: int = 0

    @property
    def states(self) -> str:
        """How many state slots there are and what for, behind a comma; nothing where there are none."""
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
    """The bytes this process may hold."""
    if settings.memory_bytes is not None:
        return settings.memory_bytes
    return share_of_memory_bytes(MEMORY_SHARE)


def check_weights_fit(budget_bytes: int, weight_bytes: int, largest_bytes: int, logit_bytes: int) -> None:
    """Refuse before reading gigabytes: what is held now, the weights, one of them twice while it is packed, the logits
    of the largest step."""
    least = resident_bytes() + weight_bytes + largest_bytes + logit_bytes + LIBRARY_BYTES
    if least > budget_bytes:
        raise ConfigError(
            f"expected a memory budget that holds the model, at least {_gib(least)} with libraries, got "
            f"{_gib(budget_bytes)}; raise it to {_gib(int(least * 1.25))} or choose a smaller model",
            code="weights_exceed_memory",
        )


def decide(
    settings: ModelSettings, budget_bytes: int, held: HeldBytes, each: PoolBytes, model_tokens: int
) -> MemoryPlan:
    """As many blocks as the rest of the budget holds, and no more than all running sequences could ever use; before
    that, state slots."""
    rest = int(budget_bytes * (1 - MARGIN_SHARE)) - MARGIN_BYTES - held.loaded - held.step
    wanted_tokens = min(settings.max_sequence_tokens or model_tokens, model_tokens)
    useful = settings.max_running * -(-wanted_tokens // settings.block_size)
    required_tokens = 1 if settings.max_sequence_tokens is None else wanted_tokens  # none for those beyond the model
    least = max(2, -(-required_tokens // settings.block_size))
    num_slots = slots_within(rest, each, settings.max_running, useful, least)
    max_running = _running_with(num_slots, settings.max_running) if each.slot else settings.max_running
    rest -= (num_slots + 1) * each.slot
    # The null block takes a place too.
    num_blocks = min(rest // each.block - 1, useful)
    if num_blocks < least or (each.slot and num_slots < LEAST_SLOTS):
        needed = held.loaded + held.step + (least + 1) * each.block + (LEAST_SLOTS + 1) * each.slot
        raise ConfigError(
            f"expected a memory budget that holds model, steps and {least} blocks{_and_slots(each)}, {_gib(needed)} in "
            f"all, got {_gib(budget_bytes)}; raise it to {_gib(int(needed * 1.1) + MARGIN_BYTES)}, or lower "
            "max_step_tokens or max_sequence_tokens"
        )
    longest = min(wanted_tokens, num_blocks * settings.block_size)
    return MemoryPlan(
        budget_bytes, held.loaded, held.step, num_blocks, each.block, settings.block_size, longest, max_running,
        num_slots, each.slot,
    )  # fmt: skip


def slots_within(rest: int, each: PoolBytes, max_running: int, useful: int, least: int) -> int:
    """How many state slots, slot 0 not counted, where blocks have a use for `useful` and cannot do with fewer than
    `least`."""
    if not each.slot:
        return 0

    def beside(num_blocks: int) -> int:
        return (rest - (num_blocks + 1) * each.block) // each.slot - 1

    room = max(int(rest * STATE_SHARE) // each.slot - 1, beside(useful), LEAST_SLOTS)
    return max(0, min(room, beside(least), (1 + KEPT_PER_RUNNING) * max_running + 1))


def _running_with(num_slots: int, max_running: int) -> int:
    """Half of the slots are for keeping, if they are few: a sequence whose state was never kept computes everything
    again."""
    return max(1, min(max_running, (num_slots - 1) // 2))


def _and_slots(each: PoolBytes) -> str:
    return f" and {LEAST_SLOTS} state slots of {_gib(each.slot)}" if each.slot else ""


def resident_bytes() -> int:
    """What the process holds now."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """The most it has held since `forget_peak`."""
    return _status_bytes("VmHWM")


def forget_peak() -> None:
    """Begin a new measurement, where the system lets us."""
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
    import resource  # noqa: PLC0415 - where there is no /proc

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
