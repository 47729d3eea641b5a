"""The sampler: the same tokens as the plain one of the tests, among allowed tokens too.

Small vocabularies are compared with the plain sampler, where ties and borders come fast. Those of a real size are
compared with the definition in numpy, and masked rows with the same rows whose other tokens are as good as banned.
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
    """Against the plain sampler, the definition in numpy, and bans instead of masks."""
    found = survey(proof.sized(quick=2_000, full=20_000), proof.random.getrandbits(32))
    for line in found.wrong[:5]:
        say(f"  {line[:400]}")
    proof.at_least("sampler_rows", found.num_rows, proof.sized(quick=2_000, full=20_000))
    proof.report("sampler_near_ties", found.num_near_ties, "rows that rounding may decide")
    wrong = [_large_batch(proof) for _ in range(proof.sized(quick=3, full=40))]
    proof.report("sampler_large_rows", len(wrong) * ROWS, f"of {VOCABULARY:,} tokens")
    proof.equals("sampler_unequal", len(found.wrong) + sum(wrong), 0)


def _large_batch(proof: Proof) -> int:
    """Rows of one batch whose token is another by numpy, or with bans in the place of a mask."""
    dice = np.random.default_rng(proof.random.getrandbits(64))
    spreads = dice.choice([0.01, 0.3, 1.0, 3.0, 8.0], (ROWS, 1))
    logits = (dice.standard_normal((ROWS, VOCABULARY)) * spreads).astype(np.float32)
    samplings = [_sampling(dice) for _ in range(ROWS)]
    is_left = dice.random((ROWS, VOCABULARY)) < dice.choice([0.0001, 0.01, 0.5, 1.0], (ROWS, 1))
    is_left[:, 0] = True
    masks = [np.packbits(row, bitorder="little").tobytes() for row in is_left]
    struck = np.where(is_left, logits, np.float32(-3e38))
    found, among = choose(logits, samplings), choose(logits, samplings, masks=masks)
    with _without_kernels():
        plain, dense = choose(logits, samplings), choose(struck, samplings)
    return sum(one != other for one, other in zip([*found, *among], [*plain, *dense], strict=True))


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
