"""The sampler with its native kernels: it samples the same tokens as slower reference samplers, also under masks.

With small vocabularies, where ties are frequent, the reference is the plain sampler of the tests. With a real one it is
the definition in numpy, and a masked row must equal a row whose forbidden tokens have very low logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from benchmarks.record import say
from proofs.framework.proof import Proof, section
from quire.backends.host.sampler import choose
from quire.backends.kernels import extension
from quire.core.request import ResolvedSampling
from quire.core.step import Sampling
from tests.support.models.plain_sampler import survey

VOCABULARY = 49_152
ROWS = 16


@section("sampler: the same tokens")
def tokens(proof: Proof) -> None:
    """Compare with the plain sampler, with the definition in numpy, and with low logits instead of masks."""
    result = survey(proof.sized(quick=2_000, full=20_000), proof.random.getrandbits(32))
    for line in result.wrong[:5]:
        say(f"  {line[:400]}")
    proof.at_least("sampler_rows", result.num_rows, proof.sized(quick=2_000, full=20_000))
    proof.report("sampler_near_ties", result.num_near_ties, "rows where rounding may decide")
    unequal_counts = [_large_batch(proof) for _ in range(proof.sized(quick=3, full=40))]
    proof.report("sampler_large_rows", len(unequal_counts) * ROWS, f"of {VOCABULARY:,} tokens")
    proof.equals("sampler_unequal", len(result.wrong) + sum(unequal_counts), 0)


def _large_batch(proof: Proof) -> int:
    """The number of rows of one random batch whose token differs from that of numpy, without and with masks."""
    dice = np.random.default_rng(proof.random.getrandbits(64))
    scales = dice.choice([0.01, 0.3, 1.0, 3.0, 8.0], (ROWS, 1))
    logits = (dice.standard_normal((ROWS, VOCABULARY)) * scales).astype(np.float32)
    samplings = [_sampling(dice) for _ in range(ROWS)]
    is_allowed = dice.random((ROWS, VOCABULARY)) < dice.choice([0.0001, 0.01, 0.5, 1.0], (ROWS, 1))
    is_allowed[:, 0] = True
    masks = [np.packbits(row, bitorder="little").tobytes() for row in is_allowed]
    low_logits = np.where(is_allowed, logits, np.float32(-3e38))
    tokens, masked_tokens = choose(logits, samplings), choose(logits, samplings, masks=masks)
    with _without_kernels():
        expected, expected_masked = choose(logits, samplings), choose(low_logits, samplings)
    return sum(a != b for a, b in zip([*tokens, *masked_tokens], [*expected, *expected_masked], strict=True))


def _sampling(dice: np.random.Generator) -> Sampling:
    params = ResolvedSampling(
        temperature=float(dice.choice([0.3, 0.8, 1.0, 2.0])),
        top_p=float(dice.choice([0.5, 0.95, 0.999, 1.0])),
        top_k=int(dice.choice([0, 40, 5_000])),
        min_p=float(dice.choice([0.0, 0.05])),
    )
    return Sampling(params, int(dice.integers(1 << 40)), 0, 9, 3, None)


@contextmanager
def _without_kernels() -> Iterator[None]:
    with patch.object(extension, "availability", lambda: extension.Availability(False, "the definition is asked")):
        yield
