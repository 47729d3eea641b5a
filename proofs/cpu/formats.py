"""Compares products of every weight format in float arithmetic with float64 products of the decoded weights.

The `gguf` package decodes GGUF's types; `cpu/references` decodes the schemes of safetensors files by their
specifications. An error is relative to the largest number of a row's exact product.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from proofs.cpu.references import REFERENCES, Reference
from proofs.framework.proof import Proof, section
from quire.backends.cpu.formats.gguf_source import GGUF_NAMES, gguf_source
from quire.backends.cpu.formats.packed_weight import PackedWeight
from quire.backends.cpu.formats.safetensors_source import SCHEMES
from quire.backends.cpu.formats.source import Source
from quire.backends.cpu.formats.weight_format import FORMATS, Arithmetic
from quire.backends.kernels.large_pages import Arena
from tests.support.models.gguf_blocks import SCALES_AT, dequantize, panel_product, random_rows

BOUND = 1e-5
WIDENED = tuple(sorted(set(SCALES_AT) - GGUF_NAMES))
"""Types without kernels, which are converted to 8 bits on loading, with errors larger than those of rounding."""

Doubles = NDArray[np.float64]


@section("formats against float64")
def format_error(proof: Proof) -> None:
    """Products of random shapes in every format; the largest error is compared with the bound."""
    dice, rounds = np.random.default_rng(proof.random.getrandbits(64)), proof.sized(quick=3, full=25)
    max_errors: dict[str, float] = {}
    for _ in range(rounds):
        for name, source, numbers in (*_gguf_weights(dice, sorted(GGUF_NAMES)), *_scheme_weights(dice)):
            max_errors[name] = max(max_errors.get(name, 0.0), error_of(source, numbers, dice))
    for name, error in max_errors.items():
        proof.report(f"format_error_{name}", error * 1e6, "millionths")
    proof.equals("format_error_formats", len(max_errors), len(GGUF_NAMES) + len(REFERENCES), "compared formats")
    proof.at_most("format_error", max(max_errors.values()), BOUND, f"{rounds} products of each")
    for name, source, numbers in _gguf_weights(dice, WIDENED):
        proof.report(f"widened_error_{name}", error_of(source, numbers, dice), "widened to 8 bits")


def _shape(dice: np.random.Generator) -> tuple[int, int]:
    """Return random numbers of outputs and inputs, which are whole blocks in every format."""
    return 8 * int(dice.integers(3, 20)), 256 * int(dice.integers(1, 9))


def _gguf_weights(dice: np.random.Generator, names: Sequence[str]) -> Iterator[tuple[str, Source, Doubles]]:
    for name in names:
        num_out, num_in = _shape(dice)
        rows = random_rows(name, num_out, num_in, dice)
        yield name.lower(), gguf_source(name, rows, num_in), dequantize(name, rows).astype(np.float64)


def _scheme_weights(dice: np.random.Generator) -> Iterator[tuple[str, Source, Doubles]]:
    for name, make in REFERENCES.items():
        reference = make(*_shape(dice), dice)
        yield name, source_of(reference), reference.numbers


def source_of(reference: Reference) -> Source:
    """Return the weight as the backend reads it."""
    if not reference.scheme:
        weight = reference.tensors["weight"]
        return gguf_source(weight.type, weight.array.view(np.uint8), weight.array.shape[1])
    return SCHEMES[reference.scheme](reference.tensors, reference.options)


def error_of(source: Source, numbers: Doubles, dice: np.random.Generator) -> float:
    """Return the largest error of one product, with rows of very different magnitudes."""
    weight = PackedWeight([source], Arena())
    num_rows = int(dice.integers(1, 40))
    sizes = np.exp(dice.normal(0, 3, (num_rows, 1)))
    rows = (dice.standard_normal((num_rows, source.num_in)) * sizes).astype(np.float32)
    out = panel_product(weight, rows, Arithmetic.FLOAT, 2)
    exact = rows.astype(np.float64) @ numbers.T
    return float((np.abs(out - exact).max(axis=1) / np.abs(exact).max(axis=1)).max())


def every_kind() -> list[tuple[str, Arithmetic]]:
    """Return each format with each arithmetic that it supports."""
    return [(name, kind) for name, weight_format in FORMATS.items() for kind in weight_format.arithmetics]
