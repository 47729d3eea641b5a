"""The same bits in any company: every format, arithmetic, thread count and instruction set.

A pair of products is one row's alone on one thread, and in the company of others on some number of threads; a pair of
a whole model (`cpu/models`) is a sequence alone and in another circumstance; a pair of builds is the same product by
two of them. Differences of all are one row.
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
LEAST_PAIRS, LEAST_OF_EACH = 2_000, 50
BUILDS = ("portable", "avx2", "avxvnni", "avx512", "avx512vnni")
GIVEN = {"INT4": compressed(4, 64, False), "INT8": compressed(8, 64, False), "FP8_E4M3": fp8(is_by_blocks=True)}
"""What is read from safetensors files only."""


def random_source(name: str, num_out: int, num_in: int, dice: np.random.Generator) -> Source:
    """A weight of this format with any codes."""
    if FORMATS[name].has_group:
        return source_of(GIVEN[name](num_out, num_in, dice))
    return gguf_source(name, random_rows(name, num_out, num_in, dice), num_in)


@dataclass
class Tally:
    """Pairs by what they are of, and how many differ."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: int = 0

    def add(self, names: Iterable[str], pairs: int, wrong: int) -> None:
        """So many pairs under each of these names, and together once."""
        self.counts.update(dict.fromkeys(("all", *names), pairs))
        self.wrong += wrong


@section("the same bits")
def same_bits(proof: Proof) -> None:
    """Products and whole models in any company, with any number of threads, on every instruction set."""
    tally = Tally()
    _products(proof, tally)
    _models(proof, tally)
    _instruction_sets(proof, tally)
    _neon(proof, tally)
    each = [tally.counts[f"{name} {kind.name}"] for name, kind in every_kind()]
    proof.report("bitexact_kinds", len(each), "formats and their arithmetics")
    proof.at_least("bitexact_each_kind", min(each), proof.sized(quick=1, full=LEAST_OF_EACH))
    for threads in THREADS:
        count = tally.counts[f"threads {threads}"]
        proof.at_least(f"bitexact_threads_{threads}", count, proof.sized(quick=1, full=LEAST_OF_EACH))
    proof.at_least("bitexact_pairs", tally.counts["all"], proof.sized(quick=1, full=LEAST_PAIRS))
    proof.equals("bitexact_mismatches", tally.wrong, 0)


def _products(proof: Proof, tally: Tally) -> None:
    """Of every format and arithmetic with every number of threads."""
    dice, each = np.random.default_rng(proof.random.getrandbits(64)), proof.sized(quick=2, full=12)
    for name, kind in every_kind():
        for threads in THREADS:
            found = list(_pairs(name, kind, threads, each, dice))
            tally.add((f"{name} {kind.name}", f"threads {threads}"), len(found), found.count(False))


def _pairs(name: str, kind: Arithmetic, threads: int, count: int, dice: np.random.Generator) -> Iterator[bool]:
    """Whether rows of one weight have the same bits alone and together."""
    # Wide enough that threads have something to share.
    num_out, num_in = 8 * int(dice.integers(3, 60)), 256 * int(dice.integers(1, 6))
    weight = PackedWeight([random_source(name, num_out, num_in, dice)], Arena())
    rows = dice.standard_normal((int(dice.integers(count, 70)), num_in)).astype(np.float32)
    rows *= np.exp(dice.normal(0, 4, (len(rows), 1))).astype(np.float32)
    together = panel_product(weight, rows, kind, threads)
    for at in dice.choice(len(rows), count, replace=False):
        is_same = panel_product(weight, rows[at : at + 1], kind).tobytes() == together[at].tobytes()
        if not is_same:
            say(f"  not the same bits: {name} {kind.name}, row {at} of {len(rows)}, {threads} threads")
        yield is_same


def _models(proof: Proof, tally: Tally) -> None:
    """Sequences of small models of every GGUF format."""
    num_models = 0
    for name, kind in cpu_models.kinds():
        texts = proof.sized(quick=2, full=8)
        pairs = cpu_models.circumstances_of(proof.folder, proof.random, name, kind, texts, THREADS)
        tally.add((f"{name} {kind.name}",), pairs.counts.total(), pairs.wrong)
        tally.counts.update({f"threads {count}": pairs.counts[f"threads_{count}"] for count in THREADS})
        num_models += 1
    proof.report("bitexact_models", num_models)


def _instruction_sets(proof: Proof, tally: Tally) -> None:
    """Integer products by every build that runs here, against the portable one, each in a process of its own."""
    found = {build: prints for build in BUILDS if (prints := _prints(build)) is not None}
    for build in BUILDS:
        proof.report(f"has_{build}", build in found, "whether this processor runs it")
    portable = found.pop("portable")
    for build, prints in found.items():
        wrong = [name for name in portable if prints[name] != portable[name]]
        for name in wrong[:5]:
            say(f"  not the same bits: {name} by {build}")
        tally.add((f"build {build}",), len(portable), len(wrong))
    proof.report("isa_pairs", len(found) * len(portable), "in int8, against the portable build")


def _prints(build: str) -> dict[str, str] | None:
    """Digests by this build; None where this processor does not run it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.models.format_prints"],
        env={**os.environ, "QUIRE_INSTRUCTION_SET": build},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode and "expected an instruction set" in done.stderr:
        return None
    done.check_returncode()
    prints: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return prints


def _neon(proof: Proof, tally: Tally) -> None:
    """Kernels for ARM under an emulator: their own tests, and integer products against this machine's."""
    reason = cpu_neon.missing()
    proof.report("has_neon", not reason, reason or "under an emulator; never timed")
    if reason:
        return
    found = cpu_neon.prove(proof.sized(quick=5, full=cpu_neon.CASES_EACH))
    for line in found.wrong[:10]:
        say(f"  not the same bits: {line}")
    tally.add(("neon",), found.pairs, len(found.wrong))
    proof.report("neon_builds", len(found.builds), ", ".join(sorted(found.builds)))
    proof.report("neon_pairs", found.pairs, "with all builds of this machine")
