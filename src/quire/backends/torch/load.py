"""Loads a checkpoint into a torch runner: reads the weights, plans the memory, and reports what fits in one line."""

import torch

from quire.backends import memory_plan
from quire.backends.host.block_store import num_block_bytes
from quire.backends.host.worst_step import measure_peak_bytes, worst_plans
from quire.backends.kernels.threads import use_threads
from quire.backends.loaded import LoadedRunner, OnRead, as_checkpoint_error, capacity_of
from quire.backends.protocol import Capacity
from quire.backends.torch.adapter import Adapter
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.linear import LinearKind, choose_kind
from quire.backends.torch.runner import TorchRunner
from quire.backends.torch.tiles import MAX_ROWS_PER_CALL
from quire.checkpoints import Checkpoint
from quire.checkpoints.gguf.convert import ensure_safetensors
from quire.config import ModelSettings
from quire.errors import ConfigError


def load(checkpoint: Checkpoint, settings: ModelSettings, on_read: OnRead = lambda _done, _total: None) -> LoadedRunner:
    """Load the model within the budget; raises before anything is served."""
    if settings.device != "cpu" and not _has_device(settings.device):
        raise ConfigError(f"expected a device that torch can use, got {settings.device!r}; set device to cpu")
    torch.set_num_threads(use_threads(settings.num_threads))
    budget_bytes, dtype = memory_plan.budget(settings), _kv_dtype(settings)
    with as_checkpoint_error(checkpoint.name):
        model, notes = load_model(checkpoint, settings, budget_bytes)
        num_bytes = sum(file.stat().st_size for file in checkpoint.weight_files)
        on_read(num_bytes, num_bytes)
        load_peak_bytes = memory_plan.peak_bytes()
        context = memory_plan.model_tokens(checkpoint.config)
        step_bytes = measure_step(model, settings, min(settings.max_sequence_tokens or context, context))
        loaded_bytes = memory_plan.resident_bytes()
        pool_bytes = memory_plan.PoolBytes(num_block_bytes(model.kv_shapes, settings.block_size, dtype.itemsize))
        plan = memory_plan.decide(settings, budget_bytes, loaded_bytes, step_bytes, pool_bytes, context)
    store = KVStore(model.kv_shapes, plan.num_blocks, settings.block_size, dtype, torch.device(settings.device))
    capacity = capacity_of(plan, settings, model.vocabulary_size, store.num_block_bytes)
    layout = f"torch {settings.kv_dtype}"
    return LoadedRunner(TorchRunner(model, store, capacity), plan, load_peak_bytes, layout, notes)


@torch.inference_mode()
def load_model(checkpoint: Checkpoint, settings: ModelSettings, budget_bytes: int) -> tuple[Adapter, tuple[str, ...]]:
    """Return the model with its weights, and notes for the operator on how it runs."""
    config, dtype, device = checkpoint.config, getattr(torch, settings.dtype), torch.device(settings.device)
    kind = choose_kind(dtype, device)
    sizes = [tensor.num_values for tensor in checkpoint.tensors.values()]
    memory_plan.check_weights_fit(
        budget_bytes,
        weight_bytes=sum(sizes) * dtype.itemsize,
        largest_bytes=max(sizes, default=0) * dtype.itemsize,
        logit_bytes=settings.max_step_tokens * int(config.get("vocab_size", 0) or 0) * 4,
    )
    note = f"{config['model_type']} runs through transformers' own modules"
    return Adapter(config, ensure_safetensors(checkpoint), dtype, kind, device), (note, *_product_notes(kind))


def _product_notes(kind: LinearKind) -> tuple[str, ...]:
    if not kind.is_packed:
        return (f"plain matrix products, so the result of a request may depend on its batch: {kind.reason}",)
    return () if kind.name == "native" else (f"slower matrix products: {kind.reason}",)


def _kv_dtype(settings: ModelSettings) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, settings.kv_dtype)
    return dtype


def measure_step(model: Adapter, settings: ModelSettings, max_tokens: int) -> int:
    """Return the peak memory of a step, measured by running the worst steps.

    Attention processes a step in calls of limited size. The peak is reached with one row at the end of the longest
    sequence and enough other decode rows to fill a call.
    """
    size = settings.block_size
    store = KVStore(model.kv_shapes, 1, size, _kv_dtype(settings), torch.device(settings.device))
    capacity = Capacity(1, size, max_tokens, settings.max_step_tokens, model.vocabulary_size, store.num_block_bytes)
    decode_tokens = size * -(-MAX_ROWS_PER_CALL // (8 * settings.max_running))
    return measure_peak_bytes(TorchRunner(model, store, capacity).run, worst_plans(settings, max_tokens, decode_tokens))


def _has_device(device: str) -> bool:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        return False
    return True
