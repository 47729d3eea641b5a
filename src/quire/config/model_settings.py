"""How one model is loaded. Checked once, then handed down as values."""

from dataclasses import dataclass
from typing import Literal

from quire.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float16"]
Backend = Literal["auto", "cpu", "torch"]

MEMORY_SHARE = 0.5
"""How much of the memory that is free at start the process may take when nothing was said."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How one model is loaded and how much it may hold."""

    memory_bytes: int | None = None
    """The process's whole resident memory, libraries included. None: half of what is free at start."""
    block_size: int = 32
    max_sequence_tokens: int | None = None
    """The longest sequence. None: what the model was made for, or what the pool holds if that is less."""
    max_step_tokens: int = 256
    max_running: int = 64
    dtype: Dtype = "float32"
    kv_dtype: Dtype | None = None
    """How keys and values are held; None: as the weights. bfloat16 halves what a token takes."""
    backend: Backend = "auto"
    """Who computes. `auto`: the CPU backend if it can run the model, else torch."""
    device: str = "cpu"
    """`cpu` is tested; `cuda` and `mps` are torch's and are not."""
    num_threads: int | None = None
    """None: one per physical core."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_step_tokens", "max_running"):
            _require_positive(name, getattr(self, name))
        for name in ("memory_bytes", "max_sequence_tokens", "num_threads"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if self.max_step_tokens < self.max_running + self.block_size:
            raise ConfigError(
                f"max_step_tokens must be at least max_running + block_size = {self.max_running + self.block_size}, "
                f"{self.max_step_tokens} given; raise it, or lower max_running",
                ("max_step_tokens", "max_running", "block_size"),
            )
        if self.backend not in ("auto", "cpu", "torch"):
            raise ConfigError(f"backend must be auto, cpu or torch, {self.backend!r} given", ("backend",))
        for name, dtype in (("dtype", self.dtype), ("kv_dtype", self.kv_dtype or self.dtype)):
            if dtype not in ("float32", "bfloat16", "float16"):
                raise ConfigError(f"{name} must be float32, bfloat16 or float16, {dtype!r} given", (name,))


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, {value} given", (name,))
