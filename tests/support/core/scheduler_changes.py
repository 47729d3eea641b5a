"""Rules of the core, each changed on purpose: what a replay must notice."""

from collections.abc import Callable
from typing import Any

from quire.core.memory.block_pool import BlockPool
from quire.core.scheduling import policy, scheduler
from quire.core.scheduling.acceptance_rates import Draft
from quire.core.scheduling.ngrams import Ngrams
from quire.core.scheduling.scheduler import Scheduler

CHANGES: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "nobody matches the cache": (Scheduler, "_match", lambda _self, _sequence: None),
    "chunks end anywhere": (
        scheduler,
        "chunk_length",
        lambda done, known, budget, size, _fork: max(0, min(known - done, budget, size + 1)),
    ),
    "guesses are not looked for": (Ngrams, "propose", lambda _self, _sequence, _limit: Draft()),
    "blocks are given back in order": (
        BlockPool,
        "release",
        lambda self, blocks, really=BlockPool.release: really(self, sorted(blocks)),
    ),
    "late requests go on": (Scheduler, "_end_overdue", lambda _self: None),
    "nobody is displaced": (policy, "may_preempt", lambda _newcomer, _victim: False),
}
"""What is changed, its name there, and what stands in its place."""
