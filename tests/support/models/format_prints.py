"""Prints a digest of a product for each format and arithmetic, for the build that QUIRE_INSTRUCTION_SET names."""

import hashlib
import json

import numpy as np

from quire.backends.cpu.formats.gguf_source import gguf_source
from quire.backends.cpu.formats.packed_weight import PackedWeight
from quire.backends.cpu.formats.weight_format import FORMATS, Arithmetic
from quire.backends.kernels.large_pages import Arena
from tests.support.models.gguf_blocks import panel_product, random_rows


def main() -> None:
    """One line of JSON: format to digest."""
    dice = np.random.default_rng(11)
    digests = {}
    for name, made in FORMATS.items():
        if made.has_group or Arithmetic.INTEGER not in made.arithmetics:
            continue
        weight = PackedWeight([gguf_source(name, random_rows(name, 37, 512, dice), 512)], Arena())
        rows = dice.standard_normal((23, 512)).astype(np.float32) * np.exp(dice.normal(0, 4, (23, 1))).astype(
            np.float32
        )
        rows[3, 32:64] = 0.0
        rows[4, :32] = 1e-35
        out = panel_product(weight, rows, Arithmetic.INTEGER, 2)
        digests[name] = hashlib.blake2b(out.tobytes(), digest_size=8).hexdigest()
    print(json.dumps(digests))  # noqa: T201


if __name__ == "__main__":
    main()
