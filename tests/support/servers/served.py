"""Served models without tensors: real processes and sockets around the oracle, with a small tokenizer in the parent."""

from dataclasses import replace

from quire.client.engines.served import ServedModel, Serving
from quire.config import ModelSettings
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.engine.trace_recorder import TraceSettings
from quire.worker.parent.worker_plan import Limits
from tests.support.servers.talkers import talker
from tests.support.workers.oracle_worker import ORACLE, SETTINGS, oracle_plan


def served(
    settings: ModelSettings = SETTINGS,
    *,
    faults: str = "",
    limits: Limits | None = None,
    queue: QueueConfig | None = None,
    step_s: float = 0.0,
    command: tuple[str, ...] = ORACLE,
    trace: TraceSettings | None = None,
) -> ServedModel:
    """An oracle in a worker of its own; it answers as `talker()` does in this process."""
    text = talker().text
    plan = oracle_plan(
        text.vocabulary_size,
        settings,
        faults=faults,
        limits=limits,
        queue=queue,
        step_s=step_s,
        command=command,
        trace=trace,
    )
    return ServedModel(lambda: Serving(plan, lambda ready: replace(text, info=ready.info)))
