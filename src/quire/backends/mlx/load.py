"""Loads a checkpoint into an MLX runner: reads the weights, plans the memory, and reports what fits in one line.

On a Mac the resident memory of a process does not include MLX's buffers. Memory use is therefore MLX's own count plus
what the process used before. MLX caches freed buffers; that cache is limited to the size of a step. On Apple silicon
memory is wired only if the operator enables it, because machines with changing caches were reported to panic
(ml-explore/mlx#3186: 3 of 3 runs with wired memory, 0 of 10 without). Without wired memory, the operating system may
page the model out between two requests.
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
from quire.backends.mlx.runner import MlxRunner, Owner
from quire.backends.mlx.tiles import CALL_TOKENS
from quire.backends.protocol import Capacity
from quire.checkpoints import Checkpoint
from quire.checkpoints.families import is_decoder, read_shape
from quire.checkpoints.families.layer_rules import FULL, SLIDING
from quire.checkpoints.strict_json import read_json_object
from quire.config import ModelSettings
from quire.errors import CheckpointError

MEASURED_TOKENS = 1024
"""Maximum sequence length in measured steps; the memory to gather longer sequences is calculated."""
CALLS_HELD = 2
"""Attention calls whose gathered blocks may be in memory at once: one computes while the next gathers."""
EXPERIMENTAL = (
    "the MLX backend is experimental: it is tested on MLX's CPU build, and there are no results from a Mac yet"
)


def why_not_mlx(checkpoint: Checkpoint, settings: ModelSettings) -> str | None:
    """Return None if this backend can try the model with these settings; otherwise the reason."""
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
    """Load the model within the budget; raises before anything is served. Requires that `why_not_mlx` returned None."""
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
        if settings.kv_dtype == "auto":  # the dtype that the model computes
            settings = replace(settings, kv_dtype=model.dtype)
        loaded_bytes = before_bytes + mx.get_active_memory()
        most = memory_plan.model_tokens(checkpoint.config)
        step_bytes = measure_step(owner, model, settings, min(settings.max_sequence_tokens or most, most))
    block_bytes = num_block_bytes(model.kv_shapes, settings.block_size, KV_TYPES[settings.kv_dtype].size)
    plan = memory_plan.decide(
        settings, budget_bytes, loaded_bytes, step_bytes, memory_plan.PoolBytes(block_bytes), most
    )
    mx.set_cache_limit(plan.step_bytes)
    pool = plan.num_blocks, settings.block_size, settings.kv_dtype
    store = owner.call(lambda: KVStore(model.kv_shapes, *pool))
    capacity = capacity_of(plan, settings, model.vocabulary_size, store.num_block_bytes)
    layout = f"mlx {settings.kv_dtype}"
    return LoadedRunner(MlxRunner(owner, model, store, capacity), plan, loaded_bytes, layout, _notes(model))


def load_model(checkpoint: Checkpoint, settings: ModelSettings) -> Any:
    """Return mlx-lm's module with its weights loaded. Code in the model's directory is never executed."""
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
    """Return a model checked to run over blocks. Raises CheckpointError, also for a module that needs more from its
    cache than quire's caches offer."""
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
    """Return each layer's window from the config if quire knows the family; some of mlx-lm's models ignore windows."""
    if not is_decoder(checkpoint.config):
        return None
    return tuple(layer.window for layer in read_shape(checkpoint.config).layers)


def measure_step(owner: Owner, model: Decoder, settings: ModelSettings, longest: int) -> int:
    """Return the peak memory of a step: measured with moderate sequences, plus the gathered blocks of the longest."""
    size, measured = settings.block_size, min(longest, max(MEASURED_TOKENS, settings.max_step_tokens))
    store = owner.call(lambda: KVStore(model.kv_shapes, 1, size, settings.kv_dtype))
    capacity = Capacity(1, size, longest, settings.max_step_tokens, model.vocabulary_size, store.num_block_bytes)
    runner = MlxRunner(owner, model, store, capacity)
    held_bytes = mx.get_active_memory()
    mx.reset_peak_memory()
    for plan in worst_plans(settings, measured, 2 * size):
        runner.run(plan)
    taken_bytes = max(0, mx.get_peak_memory() - held_bytes)
    logit_bytes = settings.max_step_tokens * model.vocabulary_size * 4  # the copy in numpy
    return taken_bytes + logit_bytes + gathered_bytes(model.kv_shapes, longest)


def gathered_bytes(shapes: Sequence[LayerShape], longest: int) -> int:
    """Return the bytes that attention gathers at once for the largest layer, at most float32."""
    largest = max(shape.num_values for shape in shapes)
    return CALLS_HELD * largest * max(longest, CALL_TOKENS) * mx.float32.size


def _wire_memory(budget_bytes: int) -> None:
    """On Apple silicon, keep MLX's memory resident (wired)."""
    if mx.metal.is_available():
        most = int(mx.device_info()["max_recommended_working_set_size"])
        mx.set_wired_limit(min(budget_bytes, most))


def _notes(model: Decoder) -> tuple[str, ...]:
    num_windows = sum(window is not None for window in model.windows)
    windows = (
        f"{num_windows} of {len(model.windows)} layers have a sliding window; the KV cache keeps all tokens for them"
    )
    return (EXPERIMENTAL, windows) if num_windows else (EXPERIMENTAL,)


# -- config.json fields that mlx-lm's models read ----------------------------------------------------------------------
#
# Newer configs keep all RoPE parameters in one object, or in one per layer kind where they differ; mlx-lm reads the
# older top-level fields. mlx-lm silently ignores missing fields, and the model would then use a wrong rotation.


def older_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields to add to this config, or to its text part; existing fields are not changed."""
    found: dict[str, Any] = {}
    text = config.get("text_config")
    if isinstance(text, dict):
        found["text_config"] = {**text, **older_fields(text)}
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        found |= _rotation(rope)
    if isinstance(experts := config.get("num_local_experts"), int):
        found["num_experts"] = experts
    return {name: value for name, value in found.items() if config.get(name) is None or name == "text_config"}


def _rotation(rope: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(rope.get(FULL), dict):
        found = _rotation(rope[FULL])
        if isinstance(sliding := rope.get(SLIDING), dict) and "rope_theta" in sliding:
            found["rope_local_base_freq"] = sliding["rope_theta"]
        return found
    found = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if rope.get(name) is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        found["rope_scaling"] = {**rope, "type": kind, "rope_type": kind}
    return found
