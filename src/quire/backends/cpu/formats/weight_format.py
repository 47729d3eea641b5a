"""What a weight format is: its name in files, how many bytes hold how many inputs there, and its arithmetics.

How a format lies in panels is `native/panels/format.hpp`'s business; the numbers here are its numbers.
"""

from dataclasses import dataclass
from enum import IntEnum

from quire.errors import CheckpointError


class Arithmetic(IntEnum):
    """How rows meet weights. Either way a row's bits depend on that row alone."""

    FLOAT = 0
    """Weights widened to float32, as exactly as their file says them; float32 sums."""
    INTEGER = 1
    """A row's inputs rounded to 8 bits for each 32 of them; exact sums of 32, float32 between them. The same bits on
    every processor."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One of them."""

    name: str
    native_id: int
    block_size: int
    """Inputs of one block in a file; their number must be a multiple."""
    block_bytes: int
    arithmetics: tuple[Arithmetic, ...]
    has_group: bool = False
    """Whether a weight of this format says how many inputs share a scale."""

    def row_bytes(self, num_in: int) -> int:
        """Of one output in a file; refuses inputs that are no whole blocks."""
        if num_in <= 0 or num_in % self.block_size:
            raise CheckpointError(
                f"expected a multiple of {self.block_size} inputs for a weight of format {self.name}, got {num_in}; "
                "choose the model in another format",
                code="inputs_not_whole",
            )
        return num_in // self.block_size * self.block_bytes


FLOAT_ONLY = (Arithmetic.FLOAT,)
BOTH = (Arithmetic.FLOAT, Arithmetic.INTEGER)

FORMATS = {
    made.name: made
    for made in (
        WeightFormat("F32", 0, 1, 4, FLOAT_ONLY),
        WeightFormat("F16", 1, 1, 2, FLOAT_ONLY),
        WeightFormat("BF16", 2, 1, 2, FLOAT_ONLY),
        WeightFormat("Q8_0", 3, 32, 34, BOTH),
        WeightFormat("Q4_0", 4, 32, 18, BOTH),
        WeightFormat("Q4_1", 5, 32, 20, BOTH),
        WeightFormat("Q5_0", 6, 32, 22, BOTH),
        WeightFormat("Q5_1", 7, 32, 24, BOTH),
        WeightFormat("Q4_K", 8, 256, 144, BOTH),
        WeightFormat("Q5_K", 9, 256, 176, BOTH),
        WeightFormat("Q6_K", 10, 256, 210, BOTH),
        WeightFormat("IQ4_NL", 11, 32, 18, BOTH),
        WeightFormat("IQ4_XS", 12, 256, 136, BOTH),
        WeightFormat("MXFP4", 13, 32, 17, BOTH),
        # Not in files as they are here: codes come one a byte, unpacked by their scheme.
        WeightFormat("INT4", 14, 32, 32, BOTH, has_group=True),
        WeightFormat("INT8", 15, 32, 32, BOTH, has_group=True),
        WeightFormat("FP8_E4M3", 16, 1, 1, FLOAT_ONLY, has_group=True),
    )
}
"""By name: of GGUF's types as GGUF spells them, of safetensors' as what a scheme's codes are."""
