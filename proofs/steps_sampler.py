"""The sampler: the same tokens as the plain one of the tests, among allowed tokens too, in a small part of the time.

Small vocabularies are compared with the plain sampler, where ties and borders come fast. Those of a real size are
compared with the definition in numpy, and masked rows with the same rows whose other tokens are as good as banned.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from unittest.mock import patch

import numpy as np

from benchmarks.record import say
from proofs.before import HERE, Checkout, checked_out
from proofs.proof import Proof, section
from quire.backends.host.sampler import choose
from quire.backends.kernels import extension
from quire.core.request import ResolvedSampling
from quire.core.step import Sampling
from tests.support.plain_sampler import survey

BEFORE = "c4bc106"
"""The commit before drawing was native."""
VOCABULARY = 49_152
ROWS, TURNS = 16, 5
MAX_RATIO = 0.15
SPREADS = {"flat": 0.3, "peaked": 6.0}
"""Of logits; trained models are in between."""
SCRIPT = """
import json, sys, time
import numpy as np
spread, rows, size, turns = json.loads(sys.argv[1])
from quire.core.step import Sampling
from quire.core.request import ResolvedSampling
try:
    from quire.backends.host.sampler import choose
except ImportError:
    from quire.backends.torch.sampler import choose
logits = (np.random.default_rng(7).standard_normal((rows, size)) * spread).astype(np.float32)
if "torch" in choose.__module__:
    import torch
    torch.set_num_threads(1)
    logits = torch.from_numpy(logits)
else:
    from quire.backends.kernels.threads import use_threads
    use_threads(1)
params = ResolvedSampling(temperature=0.8, top_p=0.95)
samplings = [Sampling(params, seed, 0, 5, 1, None) for seed in range(rows)]
taken = []
for turn in range(turns + 1):
    started = time.process_time()
    tokens = [one.token_id for one in choose(logits, samplings)]
    taken.append((time.process_time() - started) / rows * 1000)
print(json.dumps([sorted(taken[1:])[turns // 2], tokens]))
"""


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
    with patch.object(extension, "available", lambda: extension.Availability(False, "the definition is asked")):
        yield


@section("sampler: processor time")
def processor_time(proof: Proof) -> None:
    """A dense sampled row here and on the commit before, turn about, on one thread each."""
    ratios: dict[str, list[float]] = {name: [] for name in SPREADS}
    unequal = 0
    with checked_out(BEFORE) as before:
        for _ in range(proof.sized(quick=1, full=3)):
            for name, spread in SPREADS.items():
                there, here = (_row_ms(checkout, spread) for checkout in (before, HERE))
                ratios[name].append(here[0] / there[0])
                unequal += sum(one != other for one, other in zip(here[1], there[1], strict=True))
                say(f"  {name}: {there[0]:.2f} ms before, {here[0]:.2f} ms now")
    for name, found in ratios.items():
        proof.report(f"sampler_ratio_{name}", median(found))
    proof.at_most("sampler_ratio", max(median(found) for found in ratios.values()), MAX_RATIO)
    proof.equals("sampler_tokens_unequal_before", unequal, 0, "drawn by the commit before")


def _row_ms(checkout: Checkout, spread: float) -> tuple[float, list[int]]:
    words = ["-c", SCRIPT, json.dumps([spread, ROWS, VOCABULARY, TURNS])]
    done = checkout.run(words, timeout_s=600.0)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    each_ms, found = json.loads(done.stdout)
    return each_ms, found
