"""Prints a digest of a product for each format and arithmetic, for the build that QUIRE_NATIVE names."""

import hashlib
import json

import numpy as np

from quire.backends.cpu.formats import FORMATS, Arithmetic, PackedWeight, gguf_source
from quire.backends.kernels.large_pages import Arena
from tests.support.models.gguf_blocks import random_rows


def main() -> None:
    """One line of JSON: format to digest."""
    dice = np.random.default_rng(11)
    digests = {}
    for name, made in FORMATS.items():
        if made.has_group or Arithmetic.INTEGER not in made.arithmetics:
            continue
        weight = PackedWeight([gguf_source(name, random_rows(name, 37, 512, dice), 512)], Arena(), 1)
        rows = dice.standard_normal((23, 512)).astype(np.float32) * np.exp(dice.normal(0, 4, (23, 1))).astype(
            np.float32
        )
        rows[3, 32:64] = 0.0
        rows[4, :32] = 1e-35
        out = np.empty((23, 37), np.float32)
        weight.product(rows, out, Arithmetic.INTEGER, 2)
        digests[name] = hashlib.blake2b(out.tobytes(), digest_size=8).hexdigest()
    print(json.dumps(digests))  # noqa: T201


if __name__ == "__main__":
    main()
