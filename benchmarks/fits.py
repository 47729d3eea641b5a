"""What fits in how much memory: weights in some format and tokens of keys and values beside them, reckoned from shapes.

Nothing is measured here: a format says its bytes for each weight, a shape says how many weights and what a token's keys
and values take. The system and quire itself are given a fixed part.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from quire.backends.cpu.formats.weight_format import FORMATS

GIB = 1 << 30
MEMORIES_GB = (8, 16, 32, 64)
SYSTEM_BYTES, OWN_BYTES = 2 * GIB, GIB // 2
"""For everything else on the machine; for libraries, the tokenizer and the largest step."""
KV_BYTES = 2
"""Of one number of a key or value in bfloat16."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides a decoder's bytes."""

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
        """Matrices of the layers and the embedding in one format, a head of its own in another."""
        attention = self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        each = attention + 3 * self.hidden * self.wide
        rows = self.vocabulary * self.hidden
        held = self.layers * each + (0 if self.is_tied else rows)
        return _bytes_of(held, layers_in) + _bytes_of(rows, head_in)

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token."""
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
"""Formats of layers, and of the head beside them, as files have them."""


def _bytes_of(num_weights: int, name: str) -> int:
    made = FORMATS[name]
    return num_weights // made.block_size * made.block_bytes


def tokens_that_fit(shape: ModelShape, name: str, memory_bytes: int) -> int:
    """Tokens of keys and values that are left room for; 0 if not even the weights fit."""
    left = memory_bytes - SYSTEM_BYTES - OWN_BYTES - shape.weight_bytes(name, HELD[name])
    return max(0, left // shape.token_bytes)


def fit_rows() -> Iterator[tuple[str, ...]]:
    """Model, format, bytes of weights, bytes of a token, and the tokens that each memory holds, in words."""
    for shape in MODELS:
        for name, head in HELD.items():
            found = [tokens_that_fit(shape, name, size * GIB) for size in MEMORIES_GB]
            if any(found):
                weights, token = shape.weight_bytes(name, head) / GIB, shape.token_bytes / 1024
                yield shape.name, name, f"{weights:.1f} GiB", f"{token:,.0f} KiB", *map(_told, found)


def _told(tokens: int) -> str:
    """Rounded down, because a pool is whole blocks and a machine is never quite empty."""
    if tokens < 1_000:
        return "-"
    return f"{tokens // 1_000:,},000"


HEADER = ("model", "weights in", "take", "a token takes", *(f"tokens in {size} GB" for size in MEMORIES_GB))
