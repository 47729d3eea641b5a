"""The types of tensors in GGUF files: their numbers, and how they lie there."""

from dataclasses import dataclass

from quire.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TensorType:
    """How a kind of tensor lies in the file: this many bytes hold this many values."""

    name: str
    block_values: int
    block_bytes: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}
"""By their numbers in files: those whose numbers the `gguf` package can tell."""


def type_numbered(number: int, name: str) -> TensorType:
    """The type of the tensor of this name, or a CheckpointError that says which there are."""
    if number not in TENSOR_TYPES:
        from gguf import GGMLQuantizationType

        known = {kind.value: kind.name for kind in GGMLQuantizationType}
        supported = ", ".join(kind.name for kind in TENSOR_TYPES.values())
        rule = f"expected type {supported}, got {known.get(number, f'number {number}')}"
        way_out = "choose another file of this model, for example Q8_0 or Q4_K_M"
        raise CheckpointError(f"tensor {name[:100]!r}: {rule}; {way_out}", code="unsupported_tensor_type")
    return TENSOR_TYPES[number]
