"""Weights as their files hold them, in memory that a step reads from end to end. Needs numpy and `quire._native`.

weight_format       what a format is: a table
finite              which numbers a piece may not have
source              tensors on their way from a file into panels, a piece at a time
gguf_source         of GGUF files
safetensors_source  of safetensors: the schemes of compressed-tensors, AWQ, GPTQ and fp8
packed_weight       panels, and products with them
"""

from quire.backends.cpu.formats.gguf_source import gguf_source
from quire.backends.cpu.formats.packed_weight import PackedWeight
from quire.backends.cpu.formats.safetensors_source import SCHEMES, StoredArray
from quire.backends.cpu.formats.source import Source
from quire.backends.cpu.formats.weight_format import FORMATS, Arithmetic, WeightFormat

__all__ = [
    "FORMATS",
    "SCHEMES",
    "Arithmetic",
    "PackedWeight",
    "Source",
    "StoredArray",
    "WeightFormat",
    "gguf_source",
]
