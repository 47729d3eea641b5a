"""The native CPU kernels as functions of torch tensors: checks types and shapes, passes addresses, decides nothing.

What every kernel promises: the bits of a row depend on that row's own inputs alone.
"""

from quire.backends.torch.native.elementwise import (
    BoundNorm,
    BoundRopeWrite,
    BoundSiluMul,
    HeadNormWeights,
    add_rms_norm,
    rope_write,
    silu_mul,
)
from quire.backends.torch.native.extension import Availability, available, openmp_runtimes
from quire.backends.torch.native.paged_attention import AttentionShape, BoundAttention, NativeItems, attention
from quire.backends.torch.native.products import WEIGHT_TYPES, PackedProduct, argmax, exp, has_tiles, read_sum
from quire.backends.torch.native.store_layers import BLOCK_SIZES, HEAD_SIZES, KV_TYPES, Places, StoreLayers

__all__ = [
    "BLOCK_SIZES",
    "HEAD_SIZES",
    "KV_TYPES",
    "WEIGHT_TYPES",
    "AttentionShape",
    "Availability",
    "BoundAttention",
    "BoundNorm",
    "BoundRopeWrite",
    "BoundSiluMul",
    "HeadNormWeights",
    "NativeItems",
    "PackedProduct",
    "Places",
    "StoreLayers",
    "add_rms_norm",
    "argmax",
    "attention",
    "available",
    "exp",
    "has_tiles",
    "openmp_runtimes",
    "read_sum",
    "rope_write",
    "silu_mul",
]
