"""Settings of one model, checked once."""

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
"""Default share of the memory that is free at start."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How one model is loaded, and its limits."""

    memory_bytes: int | None = None
    """Resident memory of the whole process, libraries included. None: half of the memory that is free at start."""
    block_size: int = 32
    max_sequence_tokens: int | None = None
    """Maximum sequence length. None: the model's context length, or the pool's size if that is less."""
    max_step_tokens: int = 256
    step_ms: int = 1000
    """Time limit of a step with prefill; 0: as long as `max_step_tokens` take."""
    max_running: int = 64
    dtype: Dtype = "auto"
    """Type of the weights. `auto`: as in the file; torch uses float32."""
    arithmetic: ArithmeticName = "auto"
    """Arithmetic with weights of 4 to 8 bits. `auto`: int8."""
    kv_dtype: KVDtype = "auto"
    """Type of keys and values. `with_kv_of` resolves `auto` once the file's types are known."""
    backend: Backend = "auto"
    """Which backend runs the model. `auto`: on Apple silicon MLX, elsewhere the CPU backend if possible; else torch."""
    device: str = "cpu"
    """`cpu` is tested; `cuda` and `mps`, for torch, are not."""
    num_threads: int | None = None
    """None: one per physical core."""
    wired_memory: bool = False
    """MLX on Apple silicon wires its memory. There are reports that macOS panics with it."""
    speculation: Speculation = "auto"
    """`auto`: draft tokens from earlier text where it saves time and the backend can verify them; `off`: never."""
    tool_format: ToolFormatName = "auto"
    """`auto`: as in the chat template; `hermes`: also for templates without tools, with quire's own prompt."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_step_tokens", "max_running"):
            _require_positive(name, getattr(self, name))
        for name in ("memory_bytes", "max_sequence_tokens", "num_threads"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        self._check_steps()
        if self.backend not in get_args(Backend):
            raise ConfigError(f"expected backend auto, cpu, mlx or torch, got {self.backend!r}", ("backend",))
        if self.dtype not in get_args(Dtype):
            raise ConfigError(f"expected dtype auto, float32, bfloat16 or float16, got {self.dtype!r}", ("dtype",))
        if self.arithmetic not in get_args(ArithmeticName):
            raise ConfigError(f"expected arithmetic auto, float or int8, got {self.arithmetic!r}", ("arithmetic",))
        if self.arithmetic == "int8" and self.dtype != "auto":
            raise ConfigError(
                f"expected dtype auto with arithmetic int8, got {self.dtype}; set dtype to auto or arithmetic to float",
                ("arithmetic", "dtype"),
            )
        if self.speculation not in get_args(Speculation):
            raise ConfigError(f"expected speculation auto or off, got {self.speculation!r}", ("speculation",))
        if self.tool_format not in get_args(ToolFormatName):
            raise ConfigError(f"expected tool_format auto or hermes, got {self.tool_format!r}", ("tool_format",))
        if self.kv_dtype not in get_args(KVDtype):
            raise ConfigError(
                f"expected kv_dtype auto, float32, bfloat16, float16 or int8, got {self.kv_dtype!r}", ("kv_dtype",)
            )

    def _check_steps(self) -> None:
        if self.step_ms < 0:
            raise ConfigError(f"expected a step_ms of 0 or more, got {self.step_ms}; 0: no limit", ("step_ms",))
        if self.max_step_tokens < self.max_running + self.block_size:
            raise ConfigError(
                f"expected max_step_tokens of at least max_running + block_size = "
                f"{self.max_running + self.block_size}, got {self.max_step_tokens}; raise it, or lower max_running",
                ("max_step_tokens", "max_running", "block_size"),
            )

    def with_kv_of(self, weight_types: Collection[str]) -> "ModelSettings":
        """The same with `kv_dtype` `auto` resolved: `dtype` if that is set, else bfloat16, or float32 if every matrix
        is F32."""
        if self.kv_dtype != "auto":
            return self
        of_files: KVDtype = "float32" if set(weight_types) <= {"F32"} else "bfloat16"
        return replace(self, kv_dtype=of_files if self.dtype == "auto" else self.dtype)


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"expected {name} of at least 1, got {value}", (name,))
