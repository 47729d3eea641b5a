"""Builds an engine from a checkpoint: loads weights, sizes the KV pool, and writes a summary of one line."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.backends.load import load_backend
from quire.checkpoints import Checkpoint, Progress, quiet
from quire.checkpoints.grammar_vocabulary import grammar_tokens, grammar_vocabulary
from quire.config import ModelSettings, ServingSettings
from quire.core.digests import KEY_BYTES
from quire.core.events import KVEvent
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.engine.engine import Engine, ModelIdentity
from quire.engine.guides import GrammarMatchers
from quire.errors import ConfigError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def open_engine(
    checkpoint: Checkpoint,
    settings: ModelSettings,
    queue: QueueConfig,
    key: bytes,
    progress: Progress = quiet,
    emit: Callable[[KVEvent], None] | None = None,
) -> Engine:
    """Load a checkpoint's weights and build an engine on them. Raises CheckpointError or ConfigError.

    `emit` receives the events of cached blocks; it is called during steps.
    """
    loaded = load_backend(checkpoint, settings, lambda done, total: progress("loading weights", done, total))
    capacity = loaded.runner.capacity
    pool_tokens = capacity.num_blocks * capacity.block_size
    max_tokens = min(capacity.max_sequence_tokens, pool_tokens)
    if settings.max_sequence_tokens is not None and pool_tokens < min(
        settings.max_sequence_tokens, capacity.max_sequence_tokens
    ):
        raise ConfigError(
            f"expected a KV pool for a sequence of {settings.max_sequence_tokens} tokens, got {pool_tokens}; "
            "raise memory or lower max_model_len"
        )
    config = SchedulerConfig(
        max_step_tokens=capacity.max_step_tokens,
        max_running=loaded.memory_plan.max_running,
        max_sequence_tokens=max_tokens,
        queue=queue,
        step_cost=loaded.step_cost,
        step_limit_s=settings.step_ms / 1000,
        pin_share=settings.pin_share,
    )
    fingerprint = f"{checkpoint.fingerprint} {settings.dtype} {settings.arithmetic}"
    identity = ModelIdentity(fingerprint, loaded.kv_layout)
    engine = Engine(loaded.runner, config, identity, key, emit, _grammar_matchers(checkpoint, capacity.vocabulary_size))
    summary = f"{loaded.memory_plan.summary}; at most {max_tokens:,} tokens per request"
    exactness_parts = (loaded.exactness, settings.dtype, settings.arithmetic, loaded.kv_layout, capacity.block_size)
    exactness = " ".join(map(str, exactness_parts)) if loaded.exactness else ""
    notes = (*loaded.notes, *_length_notes(settings, max_tokens))
    engine.info = replace(engine.info, line=summary, notes=notes, exactness=exactness)
    return engine


def _length_notes(settings: ModelSettings, max_tokens: int) -> Iterator[str]:
    """Yield a note if `max_model_len` exceeds the model's maximum; `open_engine` compares it with the KV pool."""
    if settings.max_sequence_tokens is not None and settings.max_sequence_tokens > max_tokens:
        yield f"max_model_len {settings.max_sequence_tokens:,} is more than the model supports; using {max_tokens:,}"


def _grammar_matchers(checkpoint: Checkpoint, vocabulary_size: int) -> GrammarMatchers | None:
    if checkpoint.tokenizer_file is None:
        return None

    def read() -> "LLTokenizer":
        tokenizer_json, end_tokens = grammar_tokens(checkpoint)
        return grammar_vocabulary(tokenizer_json, vocabulary_size, end_tokens)

    return GrammarMatchers(read)


def kv_key(serving: ServingSettings) -> bytes:
    """Return the secret key of block digests. Without a key file it is random and valid in this process only."""
    return serving.read_kv_key() or os.urandom(KEY_BYTES)


def queue_of(serving: ServingSettings) -> QueueConfig:
    """Return the configuration of the waiting queue."""
    return QueueConfig(
        max_requests=serving.queue,
        high_head_start_s=serving.head_start_high_s,
        normal_head_start_s=serving.head_start_normal_s,
        low_head_start_s=serving.head_start_low_s,
    )
