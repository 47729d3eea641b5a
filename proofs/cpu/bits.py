"""The same bits in any batch: every format, arithmetic, thread count and instruction set.

Results are compared in pairs. A pair of products is one row's alone on one thread, and in a batch on several threads; a
pair of a model (`cpu/models`) is a sequence alone and in another circumstance; a pair of builds is the same product by
two instruction sets. All differences are counted in one row.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.record import ROOT, say
from proofs.cpu import models as cpu_models
from proofs.cpu import neon as cpu_neon
from proofs.cpu.formats import every_kind, source_of
from proofs.cpu.references import compressed, fp8
from proofs.framework.proof import Proof, section
from quire.backends.cpu.formats.gguf_source import gguf_source
from quire.backends.cpu.formats.packed_weight import PackedWeight
from quire.backends.cpu.formats.source import Source
from quire.backends.cpu.formats.weight_format import FORMATS, Arithmetic
from quire.backends.kernels.large_pages import Arena
from tests.support.models.gguf_blocks import panel_product, random_rows

THREADS = (1, 2, 3, 8, 32)
MIN_PAIRS, MIN_OF_EACH = 2_000, 50
BUILDS = ("portable", "avx2", "avxvnni", "avx512", "avx512vnni")
NOT_IN_GGUF = {"INT4": compressed(4, 64, False), "INT8": compressed(8, 64, False), "FP8_E4M3": fp8(is_by_blocks=True)}
"""Formats that only safetensors files have."""


def random_source(name: str, num_out: int, num_in: int, dice: np.random.Generator) -> Source:
    """Return a weight of this format with random codes."""
    if FORMATS[name].has_group:
        return source_of(NOT_IN_GGUF[name](num_out, num_in, dice))
    return gguf_source(name, random_rows(name, num_out, num_in, dice), num_in)


@dataclass
class Tally:
    """Numbers of compared pairs by name, and of differing ones."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: int = 0

    def add(self, names: Iterable[str], pairs: int, wrong: int) -> None:
        """Count pairs under each of these names, and once under "all"."""
        self.counts.update(dict.fromkeys(("all", *names), pairs))
        self.wrong += wrong


@section("the same bits")
def same_bits(proof: Proof) -> None:
    """Products and whole models in any batch, with any number of threads, on every instruction set."""
    tally = Tally()
    _compare_products(proof, tally)
    _compare_models(proof, tally)
    _compare_builds(proof, tally)
    _compare_neon(proof, tally)
    each = [tally.counts[f"{name} {kind.name}"] for name, kind in every_kind()]
    proof.report("bitexact_kinds", len(each), "formats and their arithmetics")
    proof.at_least("bitexact_each_kind", min(each), proof.sized(quick=1, full=MIN_OF_EACH))
    for threads in THREADS:
        count = tally.counts[f"threads {threads}"]
        proof.at_least(f"bitexact_threads_{threads}", count, proof.sized(quick=1, full=MIN_OF_EACH))
    proof.at_least("bitexact_pairs", tally.counts["all"], proof.sized(quick=1, full=MIN_PAIRS))
    proof.equals("bitexact_mismatches", tally.wrong, 0)


def _compare_products(proof: Proof, tally: Tally) -> None:
    """Compare products of every format and arithmetic, with every number of threads."""
    dice, num_each = np.random.default_rng(proof.random.getrandbits(64)), proof.sized(quick=2, full=12)
    for name, kind in every_kind():
        for threads in THREADS:
            results = list(_pairs(name, kind, threads, num_each, dice))
            tally.add((f"{name} {kind.name}", f"threads {threads}"), len(results), results.count(False))


def _pairs(name: str, kind: Arithmetic, threads: int, count: int, dice: np.random.Generator) -> Iterator[bool]:
    """Yield whether rows times one weight have the same bits alone and in a batch."""
    # Wide enough for several threads.
    num_out, num_in = 8 * int(dice.integers(3, 60)), 256 * int(dice.integers(1, 6))
    weight = PackedWeight([random_source(name, num_out, num_in, dice)], Arena())
    rows = dice.standard_normal((int(dice.integers(count, 70)), num_in)).astype(np.float32)
    rows *= np.exp(dice.normal(0, 4, (len(rows), 1))).astype(np.float32)
    batched = panel_product(weight, rows, kind, threads)
    for row in dice.choice(len(rows), count, replace=False):
        is_same = panel_product(weight, rows[row : row + 1], kind).tobytes() == batched[row].tobytes()
        if not is_same:
            say(f"  not the same bits: {name} {kind.name}, row {row} of {len(rows)}, {threads} threads")
        yield is_same


def _compare_models(proof: Proof, tally: Tally) -> None:
    """Compare sequences of small models of every GGUF format."""
    num_models = 0
    for name, kind in cpu_models.kinds():
        texts = proof.sized(quick=2, full=8)
        pairs = cpu_models.compare_circumstances(proof.folder, proof.random, name, kind, texts, THREADS)
        tally.add((f"{name} {kind.name}",), pairs.counts.total(), pairs.wrong)
        tally.counts.update({f"threads {count}": pairs.counts[f"threads_{count}"] for count in THREADS})
        num_models += 1
    proof.report("bitexact_models", num_models)


def _compare_builds(proof: Proof, tally: Tally) -> None:
    """Compare integer products of every build that runs here with the portable one, in separate processes."""
    prints_by_build = {build: prints for build in BUILDS if (prints := _digests_of(build)) is not None}
    for build in BUILDS:
        proof.report(f"has_{build}", build in prints_by_build, "whether this processor runs it")
    portable = prints_by_build.pop("portable")
    for build, prints in prints_by_build.items():
        wrong = [name for name in portable if prints[name] != portable[name]]
        for name in wrong[:5]:
            say(f"  not the same bits: {name} by {build}")
        tally.add((f"build {build}",), len(portable), len(wrong))
    proof.report("isa_pairs", len(prints_by_build) * len(portable), "in int8, against the portable build")


def _digests_of(build: str) -> dict[str, str] | None:
    """Return digests of products by this build; None if this processor cannot run it."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.models.format_prints"],
        env={**os.environ, "QUIRE_INSTRUCTION_SET": build},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if process.returncode and "expected an instruction set" in process.stderr:
        return None
    process.check_returncode()
    prints: dict[str, str] = json.loads(process.stdout.splitlines()[-1])
    return prints


def _compare_neon(proof: Proof, tally: Tally) -> None:
    """Run the tests of the ARM kernels under an emulator, and compare their integer products with this machine's."""
    reason = cpu_neon.missing()
    proof.report("has_neon", not reason, reason or "under an emulator; never timed")
    if reason:
        return
    prints = cpu_neon.prove(proof.sized(quick=5, full=cpu_neon.CASES_EACH))
    for line in prints.wrong[:10]:
        say(f"  not the same bits: {line}")
    tally.add(("neon",), prints.pairs, len(prints.wrong))
    proof.report("neon_builds", len(prints.builds), ", ".join(sorted(prints.builds)))
    proof.report("neon_pairs", prints.pairs, "with all builds of this machine")
