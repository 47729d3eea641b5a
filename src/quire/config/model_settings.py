"""Settings of one model; each instance is checked when it is created."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from quire.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVDtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
ArithmeticName = Literal["auto", "float", "int8"]
Backend = Literal["auto", "cpu", "mlx", "torch"]
Speculation = Literal["auto", "off"]
ToolFormatName = Literal["auto", "hermes"]
InstructionSet = Literal["auto", "portable", "avx2", "avxvnni", "avx512", "avx512vnni", "neondot"]
CHOICES: Mapping[str, Any] = MappingProxyType(
    {
        "backend": Backend,
        "dtype": Dtype,
        "kv_dtype": KVDtype,
        "arithmetic": ArithmeticName,
        "speculation": Speculation,
        "tool_format": ToolFormatName,
        "instruction_set": InstructionSet,
    }
)

MEMORY_SHARE = 0.5
"""Default share of the memory that is free at start."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Settings and limits of one model."""

    memory_bytes: int | None = None
    """Resident memory of the whole process, libraries included. None: half of the memory that is free at start."""
    block_size: int = 32
    max_sequence_tokens: int | None = None
    """Maximum sequence length. None: the model's context length, or the pool's size if that is less."""
    max_step_tokens: int = 256
    step_ms: int = 1000
    """Time limit of a step with prefill. 0: no limit, each step may compute `max_step_tokens`."""
    max_running: int = 64
    dtype: Dtype = "auto"
    """Weight dtype. `auto`: as in the file; torch uses float32."""
    arithmetic: ArithmeticName = "auto"
    """Arithmetic of products with weights of 4 to 8 bits. `auto`: int8."""
    kv_dtype: KVDtype = "auto"
    """Dtype of keys and values. `with_kv_dtype` resolves `auto` once the dtypes of the weights are known."""
    backend: Backend = "auto"
    """Backend that runs the model. `auto`: MLX on Apple silicon, else cpu, if it can run the model; else torch."""
    device: str = "cpu"
    """Device of the backend: `cpu`, or for torch `cuda` or `mps`, which are not tested."""
    num_threads: int | None = None
    """None: one per physical core."""
    instruction_set: InstructionSet = "auto"
    """Instruction set of the CPU kernels. `auto`: the best that this processor has, including tile registers (AMX)."""
    wired_memory: bool = False
    """MLX on Apple silicon: keep the model's memory from being paged out. macOS reportedly panics with it."""
    speculation: Speculation = "auto"
    """`auto`: n-gram speculation if it saves time and the backend can verify draft tokens; `off`: never."""
    pin_share: float = 0.25
    """Largest fraction of the KV pool that pinned prefixes may use."""
    tool_format: ToolFormatName = "auto"
    """`auto`: as in the chat template; `hermes`: also for templates without tools, with quire's own prompt."""

    def __post_init__(self) -> None:
        counts = ("block_size", "max_step_tokens", "max_running", "max_sequence_tokens", "num_threads")
        for name in ("memory_bytes", *counts):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"expected {name} of at least 1, got {value}", (name,))
        self._check_steps()
        if not 0.0 <= self.pin_share <= 1.0:
            raise ConfigError(f"expected a pin_share between 0 and 1, got {self.pin_share}", ("pin_share",))
        for name, kind in CHOICES.items():
            *words, last = get_args(kind)
            if (value := getattr(self, name)) not in (*words, last):
                raise ConfigError(f"expected {name} {', '.join(words)} or {last}, got {value!r}", (name,))
        if self.arithmetic == "int8" and self.dtype != "auto":
            raise ConfigError(
                f"expected dtype auto with arithmetic int8, got {self.dtype}; set dtype to auto or arithmetic to float",
                ("arithmetic", "dtype"),
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

    def with_kv_dtype(self, weight_types: Collection[str]) -> "ModelSettings":
        """Return a copy with `kv_dtype` resolved if it is `auto`: to `dtype` if that is set, else to bfloat16, or to
        float32 if every matrix is F32."""
        if self.kv_dtype != "auto":
            return self
        file_dtype: KVDtype = "float32" if set(weight_types) <= {"F32"} else "bfloat16"
        return replace(self, kv_dtype=file_dtype if self.dtype == "auto" else self.dtype)
