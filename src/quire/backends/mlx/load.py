"""Loads a checkpoint into an MLX runner: reads the weights, plans the memory, and reports what fits in one line.

On a Mac the resident memory of a process does not include MLX's buffers. Memory use is therefore MLX's active memory
plus the process's resident memory before loading. MLX caches freed buffers; that cache is limited to the peak memory of
one step. On Apple silicon memory is wired only if the operator enables it, because kernel panics were reported for
wired memory (ml-explore/mlx#3186: 3 of 3 runs with wired memory, 0 of 10 without). Without wired memory, the operating
system may page the model out between two requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from quire.backends import memory_plan
from quire.backends.host.block_store import LayerShape, num_block_bytes
from quire.backends.host.worst_step import worst_plans
from quire.backends.loaded import LoadedRunner, OnRead, as_checkpoint_error, capacity_of
from quire.backends.mlx.decoder import Decoder
from quire.backends.mlx.imported import utils
from quire.backends.mlx.kv_store import KV_TYPES, KVStore
from quire.backends.mlx.runner import MlxRunner, MlxThread
from quire.backends.mlx.tiles import CALL_TOKENS
from quire.backends.protocol import Capacity
from quire.checkpoints import Checkpoint
from quire.checkpoints.families import is_decoder, read_shape
from quire.checkpoints.families.layer_rules import FULL, SLIDING
from quire.checkpoints.strict_json import read_json_object
from quire.config import ModelSettings
from quire.errors import CheckpointError

MEASURED_TOKENS = 1024
"""Sequence length in measured steps, unless max_step_tokens is larger; memory for longer sequences is calculated."""
CALLS_IN_MEMORY = 2
"""Attention calls whose gathered blocks may be in memory at once: one computes while the next one gathers."""
EXPERIMENTAL = (
    "the MLX backend is experimental: it is tested on MLX's CPU build, and there are no results from a Mac yet"
)


def why_not_mlx(checkpoint: Checkpoint, settings: ModelSettings) -> str | None:
    """Return None if this backend can try the model with these settings; otherwise the reason."""
    config = checkpoint.config
    if settings.device != "cpu":
        return f"expected device cpu for the MLX backend, which selects its device itself, got {settings.device}"
    if is_decoder(config) and read_shape(config).recurrent is not None:
        return "the MLX backend runs attention layers only, the model has recurrent layers"
    if checkpoint.source.is_file():
        return f"the MLX backend reads directories of safetensors, got the GGUF file {checkpoint.source.name}"
    if settings.kv_dtype not in ("auto", *KV_TYPES):
        return f"expected kv_dtype {', '.join(KV_TYPES)} or auto for the MLX backend, got {settings.kv_dtype}"
    if settings.arithmetic == "int8":
        return "the MLX backend does not support arithmetic int8"
    return None


def load(checkpoint: Checkpoint, settings: ModelSettings, on_read: OnRead = lambda _done, _total: None) -> LoadedRunner:
    """Load the model within the budget; raises before anything is served. Requires that `why_not_mlx` returned None."""
    mlx_thread = MlxThread()
    try:
        return _load(mlx_thread, checkpoint, settings, on_read)
    except BaseException:
        mlx_thread.close()
        raise


def _load(mlx_thread: MlxThread, checkpoint: Checkpoint, settings: ModelSettings, on_read: OnRead) -> LoadedRunner:
    budget_bytes = memory_plan.budget(settings)
    weight_bytes = sum(file.stat().st_size for file in checkpoint.weight_files)
    memory_plan.check_weights_fit(budget_bytes, weight_bytes, largest_bytes=0, logit_bytes=0)
    baseline_bytes = memory_plan.resident_bytes()
    mlx_thread.call(lambda: mx.set_memory_limit(budget_bytes))
    if settings.wired_memory:
        mlx_thread.call(lambda: _wire_memory(budget_bytes))
    with as_checkpoint_error(checkpoint.name):
        model = mlx_thread.call(lambda: _load_decoder(checkpoint, settings))
        on_read(weight_bytes, weight_bytes)
        if settings.kv_dtype == "auto":  # the dtype in which the model computes keys and values
            settings = replace(settings, kv_dtype=model.dtype)
        loaded_bytes = baseline_bytes + mx.get_active_memory()
        context = memory_plan.model_tokens(checkpoint.config)
        step_bytes = measure_step(mlx_thread, model, settings, min(settings.max_sequence_tokens or context, context))
    block_bytes = num_block_bytes(model.kv_shapes, settings.block_size, KV_TYPES[settings.kv_dtype].size)
    plan = memory_plan.decide(
        settings, budget_bytes, loaded_bytes, step_bytes, memory_plan.PoolBytes(block_bytes), context
    )
    mx.set_cache_limit(plan.step_bytes)
    pool_shape = plan.num_blocks, settings.block_size, settings.kv_dtype
    store = mlx_thread.call(lambda: KVStore(model.kv_shapes, *pool_shape))
    capacity = capacity_of(plan, settings, model.vocabulary_size, store.num_block_bytes)
    layout = f"mlx {settings.kv_dtype}"
    return LoadedRunner(MlxRunner(mlx_thread, model, store, capacity), plan, loaded_bytes, layout, _notes(model))


def load_model(checkpoint: Checkpoint, settings: ModelSettings) -> Any:
    """Return mlx-lm's module with its weights loaded. Code in the model's directory is never executed."""
    try:
        legacy_fields = legacy_config_fields(read_json_object(checkpoint.directory / "config.json"))
        model, _ = utils.load_model(
            checkpoint.directory, lazy=True, strict=True, model_config=legacy_fields, trust_remote_code=False
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


def _load_decoder(checkpoint: Checkpoint, settings: ModelSettings) -> Decoder:
    """Load the model and check that it runs with quire's paged KV cache. Raises CheckpointError, also for a model that
    needs more from its cache than quire's cache objects offer."""
    model = load_model(checkpoint, settings)
    try:
        return Decoder(model, _windows(checkpoint))
    except (ValueError, TypeError, AttributeError) as error:
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"mlx-lm's {checkpoint.config['model_type']} model does not run with a paged KV cache: {text}; choose "
            "another model, or backend cpu if it runs this one",
            code="mlx_needs_own_cache",
        ) from error


def _windows(checkpoint: Checkpoint) -> tuple[int | None, ...] | None:
    """Return each layer's window from config.json, because some of mlx-lm's models ignore it; None if it is unknown."""
    if not is_decoder(checkpoint.config):
        return None
    return tuple(layer.window for layer in read_shape(checkpoint.config).layers)


def measure_step(mlx_thread: MlxThread, model: Decoder, settings: ModelSettings, max_tokens: int) -> int:
    """Return the peak memory of a step: measured with shorter sequences, plus the gathered blocks of a longest one."""
    size, num_measured = settings.block_size, min(max_tokens, max(MEASURED_TOKENS, settings.max_step_tokens))
    store = mlx_thread.call(lambda: KVStore(model.kv_shapes, 1, size, settings.kv_dtype))
    capacity = Capacity(1, size, max_tokens, settings.max_step_tokens, model.vocabulary_size, store.num_block_bytes)
    runner = MlxRunner(mlx_thread, model, store, capacity)
    baseline_bytes = mx.get_active_memory()
    mx.reset_peak_memory()
    for step_plan in worst_plans(settings, num_measured, decode_tokens=2 * size):
        runner.run(step_plan)
    peak_bytes = max(0, mx.get_peak_memory() - baseline_bytes)
    logit_bytes = settings.max_step_tokens * model.vocabulary_size * 4  # the copy in numpy
    return peak_bytes + logit_bytes + gathered_bytes(model.kv_shapes, max_tokens)


def gathered_bytes(shapes: Sequence[LayerShape], max_tokens: int) -> int:
    """Return an upper bound on the bytes that attention gathers at once for the largest layer, with float32 values."""
    max_values_per_token = max(shape.num_values for shape in shapes)
    return CALLS_IN_MEMORY * max_values_per_token * max(max_tokens, CALL_TOKENS) * mx.float32.size


def _wire_memory(budget_bytes: int) -> None:
    """On Apple silicon, wire MLX's memory: the operating system never pages it out."""
    if mx.metal.is_available():
        max_bytes = int(mx.device_info()["max_recommended_working_set_size"])
        mx.set_wired_limit(min(budget_bytes, max_bytes))


def _notes(model: Decoder) -> tuple[str, ...]:
    num_windows = sum(window is not None for window in model.windows)
    window_note = (
        f"{num_windows} of {len(model.windows)} layers have a sliding window; the KV cache keeps all tokens for them"
    )
    return (EXPERIMENTAL, window_note) if num_windows else (EXPERIMENTAL,)


# -- config.json fields that mlx-lm's models read ----------------------------------------------------------------------
#
# Newer configs have all RoPE parameters in one object, or in one per layer kind where they differ; mlx-lm reads the
# legacy top-level fields. It ignores missing fields silently, and the model would then use a wrong rotation.


def legacy_config_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the legacy fields to add to this config or to its text part; existing fields are not changed."""
    fields: dict[str, Any] = {}
    text = config.get("text_config")
    if isinstance(text, dict):
        fields["text_config"] = {**text, **legacy_config_fields(text)}
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        fields |= _legacy_rope_fields(rope)
    if isinstance(experts := config.get("num_local_experts"), int):
        fields["num_experts"] = experts
    return {name: value for name, value in fields.items() if config.get(name) is None or name == "text_config"}


def _legacy_rope_fields(rope: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(rope.get(FULL), dict):
        fields = _legacy_rope_fields(rope[FULL])
        if isinstance(sliding := rope.get(SLIDING), dict) and "rope_theta" in sliding:
            fields["rope_local_base_freq"] = sliding["rope_theta"]
        return fields
    fields = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if rope.get(name) is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        fields["rope_scaling"] = {**rope, "type": kind, "rope_type": kind}
    return fields
