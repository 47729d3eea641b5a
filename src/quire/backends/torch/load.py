"""From a checkpoint on disk to a runner: weights in, memory decided, one line that says what fits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.backends import memory_plan
from quire.backends.loaded import LoadedRunner, OnRead
from quire.backends.protocol import Capacity
from quire.backends.torch.inputs import MAX_ROWS_OF_A_CALL, TILE_ROWS
from quire.backends.torch.kv_store import KVStore, num_block_bytes
from quire.backends.torch.linear import LinearKind, choose_kind
from quire.backends.torch.models.decoder import Decoder
from quire.backends.torch.models.decoder_config import is_decoder, read_shape
from quire.backends.torch.models.model import Model
from quire.backends.torch.models.rope import read_rope
from quire.backends.torch.native_ops import NativeOps, why_not_native
from quire.backends.torch.ops import Ops, TorchOps
from quire.backends.torch.runner import TorchRunner
from quire.backends.torch.threads import use_threads
from quire.backends.torch.weight_reader import WeightReader
from quire.checkpoints import Checkpoint
from quire.config import ModelSettings
from quire.core.request import ResolvedSampling
from quire.core.step import Sampling, Scoring, StepPlan, WorkItem
from quire.errors import CheckpointError, ConfigError


def load(checkpoint: Checkpoint, settings: ModelSettings, on_read: OnRead = lambda _done, _total: None) -> LoadedRunner:
    """Load the model within the budget, or raise before anything is served."""
    if settings.device != "cpu" and not _has_device(settings.device):
        raise ConfigError(f"device must be one this torch can use, {settings.device!r} given; try cpu")
    use_threads(settings.num_threads)
    budget_bytes = memory_plan.budget(settings)
    with _quiet_failures(checkpoint):
        model, notes = load_model(checkpoint, settings, budget_bytes, on_read)
        num_bytes = _num_file_bytes(checkpoint)
        on_read(num_bytes, num_bytes)  # heads of files and tensors that nobody needs are passed over, not missing
        load_peak_bytes = memory_plan.peak_bytes()
        plan = _decide(model, checkpoint, settings, budget_bytes)
    device = torch.device(settings.device)
    store = KVStore(model.kv_shapes, plan.num_blocks, settings.block_size, _kv_dtype(settings), device)
    capacity = Capacity(
        num_blocks=plan.num_blocks,
        block_size=settings.block_size,
        max_sequence_tokens=plan.max_sequence_tokens,
        max_step_tokens=settings.max_step_tokens,
        vocabulary_size=model.vocabulary_size,
        num_kv_bytes=store.num_block_bytes,
    )
    layout = f"torch {settings.kv_dtype or settings.dtype}"
    return LoadedRunner(TorchRunner(model, store, capacity), plan, load_peak_bytes, layout, notes)


@torch.inference_mode()
def load_model(
    checkpoint: Checkpoint, settings: ModelSettings, budget_bytes: int, on_read: OnRead
) -> tuple[Model, tuple[str, ...]]:
    """The weights, on the fast path where the architecture is one of its families."""
    config = checkpoint.config
    dtype = getattr(torch, settings.dtype)
    total = _num_file_bytes(checkpoint)
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        on_read(done, total)

    device = torch.device(settings.device)
    if is_decoder(config):
        shape = read_shape(config)
        reason = why_not_native(shape, settings.block_size, dtype, device)
    else:
        shape, reason = None, f"{config['model_type']} runs through transformers' own modules, not the fast path"
    kind = choose_kind(dtype, torch.float32 if reason is None else dtype, device)
    if reason is None and kind.row_dtype != torch.float32:
        reason = kind.reason  # kernels, but no products for these weights
    reasons = () if reason is None else (reason,)
    reader = WeightReader(checkpoint.weight_files, kind.row_dtype, count)
    memory_plan.check_weights_fit(
        budget_bytes,
        reader.num_values * dtype.itemsize,
        reader.largest_values * kind.row_dtype.itemsize,
        settings.max_step_tokens * int(config.get("vocab_size", 0) or 0) * 4,
    )
    if shape is None:
        from quire.backends.torch.models.adapter import Adapter  # noqa: PLC0415 - transformers takes seconds to import

        model: Model = Adapter(config, checkpoint.directory, dtype, kind)
        return model, (*reasons, *_product_notes(kind, None))
    if settings.device != "cpu":
        raise ConfigError("the fast path is not moved to other devices yet; use device cpu")
    rope = read_rope(config, shape.head_size)
    ops: Ops = NativeOps(shape, rope) if reason is None else TorchOps(shape, rope, settings.block_size, device)
    notes = [f"slower path in plain torch: {one}" for one in reasons]
    return Decoder(shape, reader, kind, ops), (*notes, *_product_notes(kind, reason))


def _num_file_bytes(checkpoint: Checkpoint) -> int:
    return sum(file.stat().st_size for file in checkpoint.weight_files)


def _product_notes(kind: LinearKind, said: str | None) -> tuple[str, ...]:
    """What is not as it should be with products, unless the reason was said already."""
    if not kind.is_packed:
        return (f"plain products, so that an answer may depend on its company: {kind.reason}",)
    return () if kind.name == "native" or kind.reason == said else (f"slower products: {kind.reason}",)


def _decide(model: Model, checkpoint: Checkpoint, settings: ModelSettings, budget_bytes: int) -> memory_plan.MemoryPlan:
    model_tokens = _model_tokens(checkpoint)
    longest = min(settings.max_sequence_tokens or model_tokens, model_tokens)
    step_bytes = measure_step(model, settings, longest)
    block_bytes = num_block_bytes(model.kv_shapes, settings.block_size, _kv_dtype(settings))
    held_bytes = memory_plan.resident_bytes()
    return memory_plan.decide(settings, budget_bytes, held_bytes, step_bytes, block_bytes, model_tokens)


def _kv_dtype(settings: ModelSettings) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, settings.kv_dtype or settings.dtype)
    return dtype


def _model_tokens(checkpoint: Checkpoint) -> int:
    config = checkpoint.config
    for fields in (config, config.get("text_config")):
        tokens = fields.get("max_position_embeddings", fields.get("n_positions")) if isinstance(fields, dict) else None
        if isinstance(tokens, int) and tokens >= 1:
            return tokens
    return 2048


def measure_step(model: Model, settings: ModelSettings, longest: int) -> int:
    """The most a step takes: every row it may have, with all that can be asked of logits, and the longest sequences.

    Attention works through a step in calls of bounded size, so one row at the end of the longest sequence and enough
    pairs to fill a call show its peak; feeding every row at full length would only take longer."""
    size = settings.block_size
    store = KVStore(model.kv_shapes, 1, size, _kv_dtype(settings), torch.device(settings.device))
    num_fed, tail = min(settings.max_step_tokens, longest), min(TILE_ROWS, longest)
    table = (1,) * -(-longest // size)
    prompts = [_scored(0, num_fed, 0, table)]
    if num_fed > tail:
        prompts = [_scored(0, num_fed - tail, 0, table), _scored(1, tail, longest - tail, table)]
    short = size * -(-MAX_ROWS_OF_A_CALL // (8 * settings.max_running))
    params = ResolvedSampling(
        top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=5
    )
    decoding = [
        WorkItem(at, (1,), position, table, Sampling(params, 1, 0, position + 1, 1, (1,) * (position + 1)))
        for at in range(settings.max_running)
        for position in [longest - 1 if at == 0 else min(longest, short) - 1]
    ]
    capacity = Capacity(1, size, longest, settings.max_step_tokens, model.vocabulary_size, store.num_block_bytes)
    runner = TorchRunner(model, store, capacity)
    memory_plan.forget_peak()
    before = memory_plan.resident_bytes()
    runner.run(StepPlan(0, (), tuple(prompts)))
    runner.run(StepPlan(1, (), tuple(decoding)))
    return max(0, memory_plan.peak_bytes() - before)


def _scored(sequence_id: int, num_tokens: int, first: int, table: tuple[int, ...]) -> WorkItem:
    """An item of which all is wanted that can be of a prompt."""
    tokens = (1,) * num_tokens
    return WorkItem(sequence_id, tokens, first, table, scoring=Scoring(first + 1, tokens, 5))


@contextmanager
def _quiet_failures(checkpoint: Checkpoint) -> Iterator[None]:
    """Whatever a damaged model makes torch say, the person is told in one sentence."""
    try:
        yield
    except (RuntimeError, IndexError, ArithmeticError, MemoryError) as error:
        told = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{checkpoint.name} cannot be run as its config.json says: {told}; download the model again"
        ) from error


def _has_device(device: str) -> bool:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        return False
    return True
