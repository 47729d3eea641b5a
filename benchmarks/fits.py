"""Computes what fits in how much memory, from shapes: weights in some format, and tokens of keys and values.

Nothing is measured: a format has its bytes per weight, a shape has the number of weights and the bytes of a token's
keys and values. A fixed part is reserved for the system and for quire itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from quire.backends.cpu.formats.weight_format import FORMATS

GIB = 1 << 30
MEMORIES_GB = (8, 16, 32, 64)
SYSTEM_BYTES, OWN_BYTES = 2 * GIB, GIB // 2
"""Bytes for everything else on the machine; and for libraries, the tokenizer and the largest step."""
KV_BYTES = 2
"""Bytes of one number of a key or value in bfloat16."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that decide the memory of a decoder."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    wide: int
    vocabulary: int
    is_tied: bool

    def weight_bytes(self, layers_in: str, head_in: str) -> int:
        """Bytes of weights: layers (and an untied embedding) in one format, the head in another."""
        attention = self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        layer_weights = attention + 3 * self.hidden * self.wide
        rows = self.vocabulary * self.hidden
        num_weights = self.layers * layer_weights + (0 if self.is_tied else rows)
        return _bytes_of(num_weights, layers_in) + _bytes_of(rows, head_in)

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_size * KV_BYTES


MODELS = (
    ModelShape("Llama 3.2 1B", 2048, 16, 32, 8, 64, 8192, 128_256, is_tied=True),
    ModelShape("Qwen2.5 Coder 1.5B", 1536, 28, 12, 2, 128, 8960, 151_936, is_tied=True),
    ModelShape("Llama 3.2 3B", 3072, 28, 24, 8, 128, 8192, 128_256, is_tied=True),
    ModelShape("Llama 3.1 8B", 4096, 32, 32, 8, 128, 14_336, 128_256, is_tied=False),
    ModelShape("Qwen2.5 14B", 5120, 48, 40, 8, 128, 13_824, 152_064, is_tied=False),
    ModelShape("Qwen2.5 32B", 5120, 64, 40, 8, 128, 27_648, 152_064, is_tied=False),
    ModelShape("Llama 3.1 70B", 8192, 80, 64, 8, 128, 28_672, 128_256, is_tied=False),
)
HELD = {"Q4_K": "Q6_K", "Q8_0": "Q8_0", "BF16": "BF16"}
"""Formats of the layers, and of the head in the same file."""


def _bytes_of(num_weights: int, name: str) -> int:
    weight_format = FORMATS[name]
    return num_weights // weight_format.block_size * weight_format.block_bytes


def tokens_that_fit(shape: ModelShape, name: str, memory_bytes: int) -> int:
    """Return how many tokens of keys and values fit beside the weights; 0 if the weights do not fit."""
    free_bytes = memory_bytes - SYSTEM_BYTES - OWN_BYTES - shape.weight_bytes(name, HELD[name])
    return max(0, free_bytes // shape.token_bytes)


def fit_rows() -> Iterator[tuple[str, ...]]:
    """Yield rows: model, format, size of weights, size of a token, and the tokens that fit in each memory."""
    for shape in MODELS:
        for name, head in HELD.items():
            tokens = [tokens_that_fit(shape, name, size * GIB) for size in MEMORIES_GB]
            if any(tokens):
                weights, token = shape.weight_bytes(name, head) / GIB, shape.token_bytes / 1024
                yield shape.name, name, f"{weights:.1f} GiB", f"{token:,.0f} KiB", *map(_rounded_down, tokens)


def _rounded_down(tokens: int) -> str:
    """Format a number of tokens, rounded down, because a pool has whole blocks and other programs run."""
    if tokens < 1_000:
        return "-"
    return f"{tokens // 1_000:,},000"


HEADER = ("model", "weights in", "take", "a token takes", *(f"tokens in {size} GB" for size in MEMORIES_GB))
