"""A scheduler as an engine has it: with guesses from what was said before, where they are wanted. Replays too."""

from quire.core.memory.kv_memory import KVMemory
from quire.core.scheduling.ngrams import Ngrams
from quire.core.scheduling.scheduler import Scheduler
from quire.core.scheduling.scheduler_config import SchedulerConfig


def make_scheduler(config: SchedulerConfig, memory: KVMemory, *, guesses: bool) -> Scheduler:
    """A scheduler whose sequences guess what follows, if that is wanted and can be taken back."""
    if not guesses or memory.states is not None:
        return Scheduler(config, memory)
    ngrams = Ngrams()
    return Scheduler(config, memory, ngrams.propose, ngrams.ended)
