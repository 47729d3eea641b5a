"""Selects the backend for a checkpoint by the settings and loads the model with it; imports only that backend."""

import os
import platform
import sys
from dataclasses import replace
from importlib.util import find_spec

from quire.backends.kernels.extension import use_instruction_set
from quire.backends.loaded import LoadedRunner, OnRead
from quire.checkpoints import Checkpoint
from quire.checkpoints.families import is_decoder, read_shape
from quire.config import ModelSettings
from quire.errors import CheckpointError, ConfigError


def load_backend(checkpoint: Checkpoint, settings: ModelSettings, on_read: OnRead | None = None) -> LoadedRunner:
    """Load this checkpoint with the backend from the settings. For `auto`, try MLX on Apple silicon, then the CPU
    backend, then torch if it is installed."""
    prepare_kernels(settings)
    report = on_read or (lambda _done, _total: None)
    if settings.backend == "mlx" or (settings.backend == "auto" and checkpoint.is_for_mlx):
        return _load_mlx(checkpoint, settings, report)
    fallback_notes: list[str] = []
    if settings.backend == "auto" and _is_on_apple_silicon() and find_spec("mlx_lm") is not None:
        try:
            return _load_mlx(checkpoint, settings, report)
        except (ConfigError, CheckpointError) as error:
            fallback_notes.append(f"not using MLX: {error}")
    settings = settings.with_kv_dtype(checkpoint.matrix_types)
    if settings.backend == "torch":
        return _load_torch(checkpoint, settings, report, "backend is torch")
    from quire.backends.cpu import load as cpu_load  # noqa: PLC0415 - imports numpy only when used

    reason = cpu_load.why_not_cpu(checkpoint, settings)
    if reason is None:
        loaded = cpu_load.load(checkpoint, settings, report)
        return replace(loaded, notes=(*fallback_notes, *loaded.notes))
    if settings.backend == "cpu":
        raise ConfigError(f"{reason}; set backend to auto, or choose another model", ("backend",), code="not_for_cpu")
    loaded = _load_torch(checkpoint, settings, report, reason)
    return replace(loaded, notes=(*fallback_notes, f"using torch instead of the CPU backend: {reason}", *loaded.notes))


def prepare_kernels(settings: ModelSettings) -> None:
    """Set the environment variables that kernels and OpenMP read when loaded. Call before any kernel is used."""
    # A waiting thread spins first. With the default spin time, one other busy process makes a step ten times slower; a
    # short spin costs a few percent on an idle machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's own thread pool, which quire does not use
    use_instruction_set(settings.instruction_set)


def _is_on_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def _load_mlx(checkpoint: Checkpoint, settings: ModelSettings, on_read: OnRead) -> LoadedRunner:
    try:
        from quire.backends.mlx import load as mlx_load  # noqa: PLC0415, I001 - takes seconds, imported only when used
        import mlx_lm  # noqa: F401, PLC0415 - after quire's own module, which imports mlx-lm without side effects
    except ImportError as error:
        raise ConfigError(
            f"the MLX backend needs mlx-lm, but {error.name!r} is missing; install quire again with its extra mlx, "
            "such as: pip install '.[mlx]'",
            ("backend",),
            code="mlx_not_installed",
        ) from error
    reason = mlx_load.why_not_mlx(checkpoint, settings)
    if reason is not None:
        raise ConfigError(f"{reason}; set backend to cpu, or choose another model", ("backend",), code="not_for_mlx")
    return mlx_load.load(checkpoint, settings, on_read)


def _load_torch(checkpoint: Checkpoint, settings: ModelSettings, on_read: OnRead, reason: str) -> LoadedRunner:
    if is_decoder(checkpoint.config) and read_shape(checkpoint.config).recurrent is not None:
        raise ConfigError(
            f"{reason}; models with recurrent layers run on the CPU backend only: change the setting that excludes "
            "it, or choose another model",
            ("backend",),
        )
    if checkpoint.is_for_mlx:
        message = f"{reason}; weights in mlx-lm format need the MLX backend: set backend to mlx"
        raise ConfigError(message, code="weights_need_mlx")
    if settings.kv_dtype == "int8":
        raise ConfigError(
            f"{reason}; expected kv_dtype float32, bfloat16 or float16 for torch, got int8: set kv_dtype to bfloat16",
            ("kv_dtype",),
            code="no_int8_kv",
        )
    if any(tensor.parts for tensor in checkpoint.tensors.values()):
        raise ConfigError(f"{reason}; quantised safetensors run on the CPU backend only: choose the original weights")
    if settings.arithmetic == "int8":
        raise ConfigError(f"{reason}; torch has no int8 arithmetic: set arithmetic to auto or float", ("arithmetic",))
    try:
        from quire.backends.torch import load as torch_load  # noqa: PLC0415 - takes seconds, imported only when used
    except ImportError as error:
        raise ConfigError(
            f"{reason}; the torch backend needs torch and transformers, but {error.name!r} is missing; install quire "
            "again with its extra torch, such as: pip install '.[torch]'"
        ) from error
    torch_settings = replace(settings, dtype="float32") if settings.dtype == "auto" else settings
    return torch_load.load(checkpoint, torch_settings, on_read)
