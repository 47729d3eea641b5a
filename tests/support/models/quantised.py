"""Quantised weights as safetensors files keep them, packed word by word as the schemes' authors describe them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.formats.safetensors_source import StoredArray

Codes = NDArray[np.uint8]


def words_of(codes: Codes, num_bits: int) -> NDArray[np.int32]:
    """Neighbours of the last dimension, lowest bits first."""
    each = 32 // num_bits
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // each), np.uint32)
    for at in range(each):
        words |= codes[..., at::each].astype(np.uint32) << np.uint32(num_bits * at)
    return words.view(np.int32)


def awq_words(codes: Codes) -> NDArray[np.int32]:
    """Of eight neighbours, the even ones first."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8)
    return words_of(eights[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(codes.shape), 4)


@dataclass(frozen=True)
class Quantised:
    """Codes [out, in], scales and zeros [out, group]."""

    codes: Codes
    scales: NDArray[np.float16]
    zeros: Codes
    group: int

    @classmethod
    def draw(cls, num_bits: int, num_out: int, num_in: int, group: int, seed: int) -> "Quantised":
        dice = np.random.default_rng(seed)
        shape = (num_out, num_in // group)
        codes = dice.integers(0, 1 << num_bits, (num_out, num_in), dtype=np.uint8)
        scales = dice.uniform(1e-3, 1e-2, shape).astype(np.float16)
        return cls(codes, scales, dice.integers(1, 1 << num_bits, shape, dtype=np.uint8), group)

    @property
    def weight(self) -> NDArray[np.float32]:
        zeros = np.repeat(self.zeros, self.group, axis=1).astype(np.float32)
        return (self.codes.astype(np.float32) - zeros) * np.repeat(self.scales, self.group, axis=1).astype(np.float32)


Tensors = dict[str, StoredArray]
Pack = Callable[[Quantised, int], Tensors]


def compressed(made: Quantised, num_bits: int) -> Tensors:
    return {
        "weight_packed": StoredArray("I32", words_of(made.codes, num_bits)),
        "weight_scale": StoredArray("F16", made.scales),
        "weight_zero_point": StoredArray("I32", np.ascontiguousarray(words_of(made.zeros.T, num_bits).T)),
        "weight_shape": StoredArray("I64", np.array(made.codes.shape)),
    }


def gptq(made: Quantised, num_bits: int) -> Tensors:
    return {
        "qweight": StoredArray("I32", np.ascontiguousarray(words_of(made.codes, num_bits).T)),
        "qzeros": StoredArray("I32", words_of(np.ascontiguousarray((made.zeros - 1).T), num_bits)),
        "scales": StoredArray("F16", np.ascontiguousarray(made.scales.T)),
        "g_idx": StoredArray("I32", (np.arange(made.codes.shape[1]) // made.group).astype(np.int32)),
    }


def awq(made: Quantised, num_bits: int) -> Tensors:
    del num_bits
    return {
        "qweight": StoredArray("I32", awq_words(np.ascontiguousarray(made.codes.T))),
        "qzeros": StoredArray("I32", awq_words(np.ascontiguousarray(made.zeros.T))),
        "scales": StoredArray("F16", np.ascontiguousarray(made.scales.T)),
    }


def retyped(data: bytes, old: str, new: str) -> bytes:
    """A safetensors file with one of its types called another of as many bits."""
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].replace(f'"{old}"'.encode(), f'"{new}"'.encode())
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]
