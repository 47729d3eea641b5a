"""Random weights in the formats of safetensors files, packed by their specifications, with the decoded numbers.

Nothing is shared with the readers under test: codes are packed into words one by one, by shifts of Python's integers,
and the numbers are float64. (A word is a 32-bit integer that holds several codes.)

    compressed-tensors  pack-quantized: int32 words along the inputs, lowest bits first; codes are signed and kept
                        2^(bits-1) above; zeros of asymmetric weights likewise, in words along the outputs
    GPTQ                words along the inputs, lowest bits first; zeros in words along the outputs, kept one below
    AWQ                 words along the outputs, whose eighths are outputs 0 2 4 6 1 3 5 7, zeros likewise
    fp8                 e4m3: sign, 4 bits of exponent (bias 7), 3 of fraction, no infinity; a scale for each block,
                        each output, or all
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.formats.safetensors_source import StoredArray
from quire.checkpoints.quantisation import Quantisation

Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]
Dice = np.random.Generator
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
FP8_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Reference:
    """A weight as stored in a file, and its decoded numbers, [out, in]."""

    scheme: str
    """Its name in `SCHEMES`; empty for plain numbers under `weight`."""
    options: Quantisation
    tensors: Mapping[str, StoredArray]
    numbers: Doubles


Make = Callable[[int, int, Dice], Reference]


def words_of(codes: Integers, num_bits: int, places: Sequence[int] | None = None) -> NDArray[np.int32]:
    """Pack [row, code] into [row, 32-bit word]; `places` has the order of codes in a word, lowest bits first."""
    codes_per_word = 32 // num_bits
    order = places or range(codes_per_word)
    rows, size = codes.shape
    words = np.zeros((rows, -(-size // codes_per_word)), np.uint32)
    for row in range(rows):
        for word in range(words.shape[1]):
            value = 0
            for position, offset in enumerate(order):
                index = word * codes_per_word + offset
                if index < size:
                    value |= int(codes[row, index]) << (position * num_bits)
            words[row, word] = value
    return words.view(np.int32)


def _scales(dice: Dice, shape: tuple[int, int]) -> NDArray[np.float16]:
    return dice.uniform(1e-3, 2e-2, shape).astype(np.float16)


def _numbers(codes: Integers, zeros: Integers, scales: NDArray[np.floating], group: int) -> Doubles:
    """Return scale x (code - zero) for each input."""
    groups = np.arange(codes.shape[1]) // group
    return (codes - zeros[:, groups]).astype(np.float64) * scales.astype(np.float64)[:, groups]


def compressed(num_bits: int, group: int | None, is_symmetric: bool) -> Make:
    """Return a maker of compressed-tensors weights with so many bits."""

    def make(num_out: int, num_in: int, dice: Dice) -> Reference:
        size, middle = group or num_in, 1 << (num_bits - 1)
        shape = (num_out, num_in // size)
        codes = dice.integers(-middle, middle, (num_out, num_in))
        zeros = np.zeros(shape, np.int64) if is_symmetric else dice.integers(-middle, middle, shape)
        scales = _scales(dice, shape)
        tensors = {
            "weight_packed": StoredArray("I32", words_of(codes + middle, num_bits)),
            "weight_scale": StoredArray("F16", scales),
            "weight_shape": StoredArray("I64", np.array([num_out, num_in], np.int64)),
        }
        if not is_symmetric:
            words = np.ascontiguousarray(words_of((zeros + middle).T, num_bits).T)
            tensors["weight_zero_point"] = StoredArray("I32", words)
        options = Quantisation("pack-quantized", num_bits, group, is_symmetric)
        return Reference("pack-quantized", options, tensors, _numbers(codes, zeros, scales, size))

    return make


def gptq(num_bits: int, group: int) -> Make:
    """Return a maker of weights in GPTQ's first file format."""

    def make(num_out: int, num_in: int, dice: Dice) -> Reference:
        shape = (num_out, num_in // group)
        codes, zeros = dice.integers(0, 1 << num_bits, (num_out, num_in)), dice.integers(1, 1 << num_bits, shape)
        scales = _scales(dice, shape)
        tensors = {
            "qweight": StoredArray("I32", np.ascontiguousarray(words_of(codes, num_bits).T)),
            "qzeros": StoredArray("I32", words_of(zeros.T - 1, num_bits)),
            "scales": StoredArray("F16", np.ascontiguousarray(scales.T)),
            "g_idx": StoredArray("I32", (np.arange(num_in) // group).astype(np.int32)),
        }
        options = Quantisation("gptq", num_bits, group, zeros_are_less_one=True)
        return Reference("gptq", options, tensors, _numbers(codes, zeros, scales, group))

    return make


def awq(group: int) -> Make:
    """Return a maker of 4-bit AWQ weights."""

    def make(num_out: int, num_in: int, dice: Dice) -> Reference:
        shape = (num_out, num_in // group)
        codes, zeros = dice.integers(0, 16, (num_out, num_in)), dice.integers(0, 16, shape)
        scales = _scales(dice, shape)
        tensors = {
            "qweight": StoredArray("I32", words_of(codes.T, 4, AWQ_PLACES)),
            "qzeros": StoredArray("I32", words_of(zeros.T, 4, AWQ_PLACES)),
            "scales": StoredArray("F16", np.ascontiguousarray(scales.T)),
        }
        return Reference("awq", Quantisation("awq", 4, group), tensors, _numbers(codes, zeros, scales, group))

    return make


def e4m3(code: int) -> float:
    """Decode a byte."""
    sign, exponent, fraction = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def fp8(is_by_blocks: bool, is_by_outputs: bool = False) -> Make:
    """Return a maker of fp8 weights with a scale for each block of 128 x 128, each output, or the tensor."""

    def make(num_out: int, num_in: int, dice: Dice) -> Reference:
        codes = dice.integers(0, 256, (num_out, num_in)).astype(np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
        if is_by_blocks:
            shape = (-(-num_out // FP8_BLOCK), -(-num_in // FP8_BLOCK))
        else:
            shape = (num_out, 1) if is_by_outputs else (1, 1)
        scales = dice.uniform(1e-3, 2e-2, shape).astype(np.float32)
        steps = (FP8_BLOCK, FP8_BLOCK) if is_by_blocks else (1 if is_by_outputs else num_out, num_in)
        wide = scales.astype(np.float64).repeat(steps[0], 0).repeat(steps[1], 1)[:num_out, :num_in]
        values = np.array([e4m3(code) for code in range(256)])
        name = "weight_scale_inv" if is_by_blocks else "weight_scale"
        tensors = {"weight": StoredArray("F8_E4M3", codes), name: StoredArray("F32", scales)}
        options = Quantisation("fp8", 8, FP8_BLOCK if is_by_blocks else None)
        return Reference("fp8", options, tensors, values[codes] * wide)

    return make


def dense(type_name: str) -> Make:
    """Return a maker of unquantised weights."""

    def make(num_out: int, num_in: int, dice: Dice) -> Reference:
        numbers = dice.standard_normal((num_out, num_in)).astype(np.float32)
        if type_name == "BF16":
            halves = (numbers.view(np.uint32) >> 16).astype(np.uint16)
            stored, exact = halves, (halves.astype(np.uint32) << 16).view(np.float32)
        else:
            stored = exact = numbers.astype(np.float16 if type_name == "F16" else np.float32)
        tensors = {"weight": StoredArray(type_name, stored)}
        return Reference("", Quantisation("", 32, None), tensors, exact.astype(np.float64))

    return make


REFERENCES: Mapping[str, Make] = {
    **{f"dense_{name.lower()}": dense(name) for name in ("F32", "F16", "BF16")},
    **{f"compressed_int{bits}_{group}": compressed(bits, group, True) for bits in (4, 8) for group in (32, 128)},
    **{f"compressed_int{bits}_asymmetric": compressed(bits, 128, False) for bits in (4, 8)},
    **{f"compressed_int{bits}_channel": compressed(bits, None, True) for bits in (4, 8)},
    **{f"gptq_int{bits}": gptq(bits, 128) for bits in (4, 8)},
    "awq_int4": awq(128),
    "fp8_blocks": fp8(is_by_blocks=True),
    "fp8_outputs": fp8(is_by_blocks=False, is_by_outputs=True),
    "fp8_tensor": fp8(is_by_blocks=False),
}
"""Makers of all weight formats of safetensors files."""
