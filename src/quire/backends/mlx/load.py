"""From a checkpoint on disk to a runner: weights in, memory decided, one line that says what fits.

MLX counts its own buffers, and on a Mac a process's resident memory does not tell them: what the model holds is what
MLX says, beside what the process held before. Freed buffers go to a cache of MLX's, which is bounded by what a step
takes. On Apple silicon what is held is wired only where the operator says so: with it, machines with changing caches
were reported to panic (ml-explore/mlx#3186: three runs of three, and none of ten without it); without it, the system
may page the model out between two requests.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from quire.backends import memory_plan
from quire.backends.host.kv_shape import LayerShape, model_tokens, num_block_bytes
from quire.backends.host.worst_step import worst_plans
from quire.backends.loaded import LoadedRunner, OnRead, as_checkpoint_error, capacity_of
from quire.backends.mlx.decoder import Decoder
from quire.backends.mlx.imported import utils
from quire.backends.mlx.kv_store import KV_TYPES, KVStore
from quire.backends.mlx.older_config import older_fields
from quire.backends.mlx.runner import MlxRunner, Owner
from quire.backends.mlx.tiles import CALL_TOKENS
from quire.backends.protocol import Capacity
from quire.checkpoints import Checkpoint
from quire.checkpoints.families import is_decoder, read_shape
from quire.checkpoints.strict_json import read_json_object
from quire.config import ModelSettings
from quire.errors import CheckpointError

MEASURED_TOKENS = 1024
"""Steps are measured with sequences of at most so many; what longer ones gather is reckoned."""
CALLS_HELD = 2
"""Calls of attention whose gathered blocks may be held at once: one computes while the next is gathered."""
EXPERIMENTAL = (
    "the MLX backend is experimental: it is tested on MLX's CPU build, and there are no results from a Mac yet"
)


def why_not_mlx(checkpoint: Checkpoint, settings: ModelSettings) -> str | None:
    """None if this backend may try the model as it is asked for; else the reason, which names the rule."""
    config = checkpoint.config
    if settings.device != "cpu":
        return f"the MLX backend selects its device by itself, got {settings.device}"
    if is_decoder(config) and read_shape(config).recurrent is not None:
        return "the MLX backend runs models whose layers keep keys and values, this one has recurrent layers"
    if checkpoint.source.is_file():
        return f"the MLX backend reads directories of safetensors, {checkpoint.source.name} is a GGUF file"
    if settings.kv_dtype not in ("auto", *KV_TYPES):
        return f"the MLX backend holds keys and values in {', '.join(KV_TYPES)}, not in {settings.kv_dtype}"
    if settings.arithmetic == "int8":
        return "the MLX backend has no arithmetic int8"
    return None


def load(checkpoint: Checkpoint, settings: ModelSettings, on_read: OnRead = lambda _done, _total: None) -> LoadedRunner:
    """Load the model within the budget, or raise before anything is served. `why_not_mlx` has nothing against it."""
    owner = Owner()
    try:
        return _load(owner, checkpoint, settings, on_read)
    except BaseException:
        owner.end()
        raise


def _load(owner: Owner, checkpoint: Checkpoint, settings: ModelSettings, on_read: OnRead) -> LoadedRunner:
    budget_bytes = memory_plan.budget(settings)
    num_bytes = sum(file.stat().st_size for file in checkpoint.weight_files)
    memory_plan.check_weights_fit(budget_bytes, num_bytes, 0, 0)
    before_bytes = memory_plan.resident_bytes()
    owner.call(lambda: mx.set_memory_limit(budget_bytes))
    if settings.wired_memory:
        owner.call(lambda: _wire_memory(budget_bytes))
    with as_checkpoint_error(checkpoint.name):
        model = owner.call(lambda: _probed(checkpoint, settings))
        on_read(num_bytes, num_bytes)
        settings = _with_kv_of(model, settings)
        loaded_bytes = before_bytes + mx.get_active_memory()
        most = model_tokens(checkpoint.config)
        step_bytes = measure_step(owner, model, settings, min(settings.max_sequence_tokens or most, most))
    block_bytes = num_block_bytes(model.kv_shapes, settings.block_size, KV_TYPES[settings.kv_dtype].size)
    held, each = memory_plan.HeldBytes(loaded_bytes, step_bytes), memory_plan.PoolBytes(block_bytes)
    plan = memory_plan.decide(settings, budget_bytes, held, each, most)
    mx.set_cache_limit(plan.step_bytes)
    pool = plan.num_blocks, settings.block_size, settings.kv_dtype
    store = owner.call(lambda: KVStore(model.kv_shapes, *pool))
    capacity = capacity_of(plan, settings, model.vocabulary_size, store.num_block_bytes)
    layout = f"mlx {settings.kv_dtype}"
    return LoadedRunner(MlxRunner(owner, model, store, capacity), plan, loaded_bytes, layout, _notes(model))


def load_model(checkpoint: Checkpoint, settings: ModelSettings) -> Any:
    """mlx-lm's module with the weights in it. Code that a model's directory brings is never run."""
    try:
        older = older_fields(read_json_object(checkpoint.directory / "config.json"))
        model, _ = utils.load_model(
            checkpoint.directory, lazy=True, strict=True, model_config=older, trust_remote_code=False
        )
    except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError) as error:
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(
            f"mlx-lm cannot load this {checkpoint.config['model_type']} model: {text}; choose another model, or "
            "backend cpu if it runs this one",
            code="mlx_cannot_load",
        ) from error
    if settings.dtype != "auto":
        model.set_dtype(getattr(mx, settings.dtype))
    mx.eval(model.parameters())
    return model


def _probed(checkpoint: Checkpoint, settings: ModelSettings) -> Decoder:
    """A model that runs over blocks as it runs by itself, or a CheckpointError: what a module raises that asks our
    caches for more than they have is told in a sentence."""
    model = load_model(checkpoint, settings)
    try:
        return Decoder(model, _windows(checkpoint))
    except (ValueError, TypeError, AttributeError) as error:
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"mlx-lm's {checkpoint.config['model_type']} cannot run over blocks: {text}; choose another model, or "
            "backend cpu if it runs this one",
            code="mlx_needs_own_cache",
        ) from error


def _windows(checkpoint: Checkpoint) -> tuple[int | None, ...] | None:
    """How far back each layer sees by its config, where we know the family: some of mlx-lm's models see everything."""
    if not is_decoder(checkpoint.config):
        return None
    return tuple(layer.window for layer in read_shape(checkpoint.config).layers)


def measure_step(owner: Owner, model: Decoder, settings: ModelSettings, longest: int) -> int:
    """The most a step takes: the worst ones run with sequences of moderate length, and what the longest gather."""
    size, measured = settings.block_size, min(longest, max(MEASURED_TOKENS, settings.max_step_tokens))
    store = owner.call(lambda: KVStore(model.kv_shapes, 1, size, settings.kv_dtype))
    capacity = Capacity(1, size, longest, settings.max_step_tokens, model.vocabulary_size, store.num_block_bytes)
    runner = MlxRunner(owner, model, store, capacity)
    held_bytes = mx.get_active_memory()
    mx.reset_peak_memory()
    for plan in worst_plans(settings, measured, 2 * size):
        runner.run(plan)
    taken_bytes = max(0, mx.get_peak_memory() - held_bytes)
    logit_bytes = settings.max_step_tokens * model.vocabulary_size * 4  # numpy's copy
    return taken_bytes + logit_bytes + gathered_bytes(model.kv_shapes, longest)


def gathered_bytes(shapes: Sequence[LayerShape], longest: int) -> int:
    """What attention gathers at once: of the largest layer, in float32 at most."""
    largest = max(shape.num_values for shape in shapes)
    return CALLS_HELD * largest * max(longest, CALL_TOKENS) * mx.float32.size


def _with_kv_of(model: Decoder, settings: ModelSettings) -> ModelSettings:
    """Keys and values as the model makes them, if nothing was said."""
    return settings if settings.kv_dtype != "auto" else replace(settings, kv_dtype=model.dtype)


def _wire_memory(budget_bytes: int) -> None:
    """On Apple silicon what MLX holds stays in memory whatever the system does."""
    if mx.metal.is_available():
        most = int(mx.device_info()["max_recommended_working_set_size"])
        mx.set_wired_limit(min(budget_bytes, most))


def _notes(model: Decoder) -> tuple[str, ...]:
    num_windows = sum(window is not None for window in model.windows)
    windows = (
        f"{num_windows} of {len(model.windows)} layers have a sliding window; the KV cache keeps all tokens for them"
    )
    return (EXPERIMENTAL, windows) if num_windows else (EXPERIMENTAL,)
