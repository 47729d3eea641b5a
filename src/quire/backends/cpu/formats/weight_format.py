"""Weight formats: name in files, block size in inputs and bytes, and supported arithmetics.

The panel layout of a format is defined in `native/panels/format.hpp`; the ids here are the ids used there.
"""

from dataclasses import dataclass
from enum import IntEnum

from quire.errors import CheckpointError


class Arithmetic(IntEnum):
    """How products are computed. In both arithmetics a row's bits depend only on that row."""

    FLOAT = 0
    """Weights converted exactly to float32; sums in float32."""
    INTEGER = 1
    """Inputs quantized to 8 bits in groups of 32; exact integer sums per group, float32 sums of groups. The result bits
    are equal on every processor."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One weight format."""

    name: str
    native_id: int
    block_size: int
    """Inputs per block in a file; a weight's number of inputs must be a multiple of it."""
    block_bytes: int
    arithmetics: tuple[Arithmetic, ...]
    has_group: bool = False
    """Whether each weight of this format has its own number of inputs per scale (`Source.group`)."""

    def row_bytes(self, num_in: int) -> int:
        """Return the bytes of one output in a file. Raises CheckpointError unless the inputs are whole blocks."""
        if num_in <= 0 or num_in % self.block_size:
            raise CheckpointError(
                f"expected a multiple of {self.block_size} inputs for a weight of format {self.name}, got {num_in}; "
                "choose the model in another format",
                code="inputs_not_whole",
            )
        return num_in // self.block_size * self.block_bytes


FLOAT_ONLY = (Arithmetic.FLOAT,)
FLOAT_OR_INTEGER = (Arithmetic.FLOAT, Arithmetic.INTEGER)

FORMATS = {
    weight_format.name: weight_format
    for weight_format in (
        WeightFormat("F32", 0, 1, 4, FLOAT_ONLY),
        WeightFormat("F16", 1, 1, 2, FLOAT_ONLY),
        WeightFormat("BF16", 2, 1, 2, FLOAT_ONLY),
        WeightFormat("Q8_0", 3, 32, 34, FLOAT_OR_INTEGER),
        WeightFormat("Q4_0", 4, 32, 18, FLOAT_OR_INTEGER),
        WeightFormat("Q4_1", 5, 32, 20, FLOAT_OR_INTEGER),
        WeightFormat("Q5_0", 6, 32, 22, FLOAT_OR_INTEGER),
        WeightFormat("Q5_1", 7, 32, 24, FLOAT_OR_INTEGER),
        WeightFormat("Q4_K", 8, 256, 144, FLOAT_OR_INTEGER),
        WeightFormat("Q5_K", 9, 256, 176, FLOAT_OR_INTEGER),
        WeightFormat("Q6_K", 10, 256, 210, FLOAT_OR_INTEGER),
        WeightFormat("IQ4_NL", 11, 32, 18, FLOAT_OR_INTEGER),
        WeightFormat("IQ4_XS", 12, 256, 136, FLOAT_OR_INTEGER),
        WeightFormat("MXFP4", 13, 32, 17, FLOAT_OR_INTEGER),
        # Not file formats: the scheme unpacks codes to one byte each.
        WeightFormat("INT4", 14, 32, 32, FLOAT_OR_INTEGER, has_group=True),
        WeightFormat("INT8", 15, 32, 32, FLOAT_OR_INTEGER, has_group=True),
        WeightFormat("FP8_E4M3", 16, 1, 1, FLOAT_ONLY, has_group=True),
    )
}
"""Formats by name: GGUF type names, or for safetensors the dtype of a scheme's codes."""
