"""Prints how far small hybrids are from plain float64, for the build that QUIRE_INSTRUCTION_SET names."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tests.support.models.plain_hybrids import CONFIGS, FedSequences, open_decoder, plain_logits, write_hybrid

LENGTHS = (290, 1, 5, 33)
"""The first ends behind the rows that a chain of products takes at once."""
TOLERANCE = 1e-4
"""Of the largest number: a chain of roundings in float32."""


def texts_of() -> list[list[int]]:
    """Random tokens."""
    dice = np.random.default_rng(1)
    return [dice.integers(0, 61, length).tolist() for length in LENGTHS]


def worst_of(config: Mapping[str, Any], folder: Path) -> float:
    """The largest difference of any logit, as a share of the largest logit, of sequences side by side."""
    texts, tensors = texts_of(), write_hybrid(folder, config)
    sequences = FedSequences(open_decoder(folder), texts)
    sequences.feed(dict(enumerate(LENGTHS)))
    worst = 0.0
    for number, text in enumerate(texts):
        expected = plain_logits(config, tensors, text)
        wrong = np.abs(sequences.logits(number) - expected).max()
        worst = max(worst, float(wrong / np.abs(expected).max()))
    return worst


def main() -> None:
    """One line of JSON."""
    with TemporaryDirectory() as scratch:
        worst = {name: worst_of(config, Path(scratch) / str(at)) for at, (name, config) in enumerate(CONFIGS.items())}
    print(json.dumps(worst))  # noqa: T201


if __name__ == "__main__":
    main()
