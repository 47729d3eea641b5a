"""How one model is loaded. Checked once, then handed down as values."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, get_args

from quire.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVDtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
ArithmeticName = Literal["auto", "float", "int8"]
Backend = Literal["auto", "cpu", "mlx", "torch"]
Speculation = Literal["auto", "off"]
ToolFormatName = Literal["auto", "hermes"]

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
    step_ms: int = 1000
    """How long a step may take that reads prompts; 0: as long as `max_step_tokens` take."""
    max_running: int = 64
    dtype: Dtype = "auto"
    """How weights are held. `auto`: as the file has them; torch holds float32."""
    arithmetic: ArithmeticName = "auto"
    """How rows meet weights of 4 to 8 bits. `auto`: in int8."""
    kv_dtype: KVDtype = "auto"
    """How keys and values are held. `auto` is settled by `with_kv_of`, when the file's types are known."""
    backend: Backend = "auto"
    """Who computes. `auto`: on Apple silicon MLX, elsewhere the CPU backend, if it can run the model; else torch."""
    device: str = "cpu"
    """`cpu` is tested; `cuda` and `mps` are torch's and are not."""
    num_threads: int | None = None
    """None: one per physical core."""
    wired_memory: bool = False
    """MLX on Apple silicon keeps in memory what it holds. There are reports that macOS panics with it."""
    speculation: Speculation = "auto"
    """`auto`: guess tokens from what was said before, where it pays and the backend can tell; `off`: never."""
    tool_format: ToolFormatName = "auto"
    """`auto`: as the chat template shows; `hermes`: also where it shows nothing, in words of ours."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_step_tokens", "max_running"):
            _require_positive(name, getattr(self, name))
        for name in ("memory_bytes", "max_sequence_tokens", "num_threads"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        self._check_steps()
        if self.backend not in get_args(Backend):
            raise ConfigError(f"backend must be auto, cpu, mlx or torch, {self.backend!r} given", ("backend",))
        if self.dtype not in get_args(Dtype):
            raise ConfigError(f"dtype must be auto, float32, bfloat16 or float16, {self.dtype!r} given", ("dtype",))
        if self.arithmetic not in get_args(ArithmeticName):
            raise ConfigError(f"arithmetic must be auto, float or int8, {self.arithmetic!r} given", ("arithmetic",))
        if self.arithmetic == "int8" and self.dtype != "auto":
            raise ConfigError(
                f"arithmetic int8 needs weights as the file has them, dtype is {self.dtype}; set dtype to auto, or "
                "arithmetic to float",
                ("arithmetic", "dtype"),
            )
        if self.speculation not in get_args(Speculation):
            raise ConfigError(f"speculation must be auto or off, {self.speculation!r} given", ("speculation",))
        if self.tool_format not in get_args(ToolFormatName):
            raise ConfigError(f"tool_format must be auto or hermes, {self.tool_format!r} given", ("tool_format",))
        if self.kv_dtype not in get_args(KVDtype):
            raise ConfigError(
                f"kv_dtype must be auto, float32, bfloat16, float16 or int8, {self.kv_dtype!r} given", ("kv_dtype",)
            )

    def _check_steps(self) -> None:
        if self.step_ms < 0:
            raise ConfigError(f"expected a step_ms of 0 or more, got {self.step_ms}; 0: no limit", ("step_ms",))
        if self.max_step_tokens < self.max_running + self.block_size:
            raise ConfigError(
                f"max_step_tokens must be at least max_running + block_size = {self.max_running + self.block_size}, "
                f"{self.max_step_tokens} given; raise it, or lower max_running",
                ("max_step_tokens", "max_running", "block_size"),
            )

    def with_kv_of(self, weight_types: Collection[str]) -> "ModelSettings":
        """The same with a `kv_dtype` of `auto` settled: as `dtype` if that says one, else bfloat16, but float32 for a
        model whose every matrix is F32."""
        if self.kv_dtype != "auto":
            return self
        of_files: KVDtype = "float32" if set(weight_types) <= {"F32"} else "bfloat16"
        return replace(self, kv_dtype=of_files if self.dtype == "auto" else self.dtype)


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, {value} given", (name,))
