"""Loads a checkpoint into a CPU runner: reads the weights, plans the memory, and reports what fits in one line."""

from collections.abc import Iterator

from quire.backends import memory_plan
from quire.backends.cpu.decoder import Decoder
from quire.backends.cpu.formats.weight_format import Arithmetic
from quire.backends.cpu.kv_store import STORED_AS, KVStore, block_bytes
from quire.backends.cpu.linear import Packer
from quire.backends.cpu.runner import CpuRunner
from quire.backends.cpu.state_store import FLOAT_BYTES, StateStore
from quire.backends.cpu.tiles import max_record_bytes
from quire.backends.cpu.weight_reader import WeightReader, format_of
from quire.backends.host.worst_step import measure_peak_bytes, measure_step_cost, worst_plans
from quire.backends.kernels.extension import availability
from quire.backends.kernels.products import WEIGHT_TYPES, has_amx, probe
from quire.backends.kernels.threads import use_threads
from quire.backends.loaded import LoadedRunner, OnRead, as_checkpoint_error, capacity_of
from quire.backends.protocol import Capacity
from quire.checkpoints import Checkpoint
from quire.checkpoints.families import read_shape, why_not_decoder, window_note
from quire.config import ModelSettings
from quire.errors import ConfigError

HEAD_SIZES = range(32, 512 + 1, 8)
BLOCK_SIZES = (16, 32, 64)


def why_not_cpu(checkpoint: Checkpoint, settings: ModelSettings) -> str | None:
    """Return None if this backend can run the model with these settings; otherwise the reason."""
    config = checkpoint.config
    if settings.device != "cpu":
        return f"the CPU backend needs device cpu, got {settings.device}"
    if checkpoint.is_for_mlx:
        return "the CPU backend does not read weights in mlx-lm format"
    if (reason := why_not_decoder(config)) is not None:
        return f"the CPU backend does not support this model: {reason}"
    if settings.dtype not in ("auto", *WEIGHT_TYPES):
        return f"the CPU backend needs dtype {' or '.join(WEIGHT_TYPES)} or auto, got {settings.dtype}"
    if settings.kv_dtype not in STORED_AS:
        return f"the CPU backend needs kv_dtype {' or '.join(STORED_AS)}, got {settings.kv_dtype}"
    sizes = {layer.head_size for layer in read_shape(config).layers}
    if not sizes.issubset(HEAD_SIZES) or settings.block_size not in BLOCK_SIZES:
        return (
            "the CPU backend needs heads of 32 to 512 in steps of 8 and blocks of 16, 32 or 64, got "
            f"{', '.join(map(str, sorted(sizes)))} and {settings.block_size}"
        )
    return probe("bfloat16" if _uses_amx(settings) else "float32")


def load(checkpoint: Checkpoint, settings: ModelSettings, on_read: OnRead = lambda _done, _total: None) -> LoadedRunner:
    """Load the model within the budget; raises before anything is served. Requires that `why_not_cpu` returned None."""
    _check_arithmetic(checkpoint, settings)
    use_threads(settings.num_threads)
    budget_bytes = memory_plan.budget(settings)
    with as_checkpoint_error(checkpoint.name):
        model = load_model(checkpoint, settings, budget_bytes, on_read)
        load_peak_bytes = memory_plan.peak_bytes()
        context = memory_plan.model_tokens(checkpoint.config)
        step_bytes = measure_step(model, settings, min(settings.max_sequence_tokens or context, context))
        loaded_bytes = memory_plan.resident_bytes()
        bytes_per_block = block_bytes(model.kv_shapes, settings.block_size, settings.kv_dtype)
        pool_bytes = memory_plan.PoolBytes(bytes_per_block, model.slot_size * FLOAT_BYTES)
        plan = memory_plan.decide(settings, budget_bytes, loaded_bytes, step_bytes, pool_bytes, context)
    kv_dtype = settings.kv_dtype
    store = KVStore(model.kv_shapes, plan.num_blocks, settings.block_size, kv_dtype)
    capacity = capacity_of(plan, settings, model.vocabulary_size, store.num_block_bytes)
    runner = CpuRunner(model, store, capacity, StateStore(model.slot_size, plan.num_slots) if plan.num_slots else None)
    # A rejected draft cannot be removed from a recurrent state, so models with such states run without drafts.
    uses_drafts = settings.speculation != "off" and not plan.num_slots
    cost = measure_step_cost(runner.run, capacity) if uses_drafts else None
    notes = tuple(_notes(model, settings, plan))
    exactness = f"cpu {availability().isa}{' tiles' if _uses_amx(settings) else ''}"
    return LoadedRunner(runner, plan, load_peak_bytes, f"cpu {kv_dtype}", notes, exactness, cost)


def _notes(model: Decoder, settings: ModelSettings, plan: memory_plan.MemoryPlan) -> Iterator[str]:
    if (note := window_note(model.shape)) is not None:
        yield note
    if plan.max_running < settings.max_running:
        yield (
            f"max_running is {plan.max_running} instead of {settings.max_running}: {plan.num_slots} state slots fit "
            "into the memory, and each sequence needs two, one to run and one for its cache; raise the memory budget"
        )


def _check_arithmetic(checkpoint: Checkpoint, settings: ModelSettings) -> None:
    """Raise ConfigError if arithmetic int8 was requested and no weight supports it."""
    matrices = [tensor for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2]
    formats = {format_of(tensor, settings.dtype) for tensor in matrices}
    if settings.arithmetic == "int8" and not any(Arithmetic.INTEGER in fmt.arithmetics for fmt in formats):
        names = ", ".join(sorted(fmt.name for fmt in formats))
        raise ConfigError(
            f"expected weights of 4 to 8 bits for arithmetic int8, got {names}; set arithmetic to auto, or "
            "choose the model in another format",
            ("arithmetic",),
            code="no_integer_weights",
        )


def _uses_amx(settings: ModelSettings) -> bool:
    """Whether AMX tile registers are used. They also round the rows, so bfloat16 must be requested explicitly."""
    return settings.dtype == "bfloat16" and availability().is_available and has_amx()


def load_model(checkpoint: Checkpoint, settings: ModelSettings, budget_bytes: int, on_read: OnRead) -> Decoder:
    """Read and pack the weights."""
    total_bytes = sum(file.stat().st_size for file in checkpoint.weight_files)
    done_bytes = 0

    def report_read(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        on_read(done_bytes, total_bytes)

    config = checkpoint.config
    shape = read_shape(config)
    reader = WeightReader(checkpoint, settings.dtype, report_read)
    logit_bytes = settings.max_step_tokens * shape.vocabulary_size * 4
    memory_plan.check_weights_fit(budget_bytes, reader.unread_bytes, largest_bytes=0, logit_bytes=logit_bytes)
    packer = Packer(settings.arithmetic, _uses_amx(settings))
    model = Decoder(shape, reader, packer, settings.kv_dtype == "int8")
    on_read(total_bytes, total_bytes)  # file headers and unused tensors are skipped, not missing
    return model


def measure_step(model: Decoder, settings: ModelSettings, max_tokens: int) -> int:
    """Measure the peak memory of a step by running the worst steps.

    Attention reads a sequence block by block, so longer sequences only add records (partial results of segments).
    """
    size = settings.block_size
    store = KVStore(model.kv_shapes, 1, size, settings.kv_dtype)
    states = StateStore(model.slot_size, settings.max_running) if model.slot_size else None
    capacity = Capacity(1, size, max_tokens, settings.max_step_tokens, model.vocabulary_size, store.num_block_bytes)
    shallow = model.shallow()
    if states is not None:
        shallow.touch(states)
    runner = CpuRunner(shallow, store, capacity, states)
    plans = worst_plans(settings, min(max_tokens, settings.max_step_tokens), decode_tokens=2 * size)
    return measure_peak_bytes(runner.run, plans) + max_record_bytes(model.shape, max_tokens)
