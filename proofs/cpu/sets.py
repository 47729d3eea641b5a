"""Every instruction set that this machine can be made to use: the same bits, its own speed, beside llama.cpp.

    sets: bits        products of all builds, at their limits too, against the portable one
    sets: one row     weights of Q4_K and Q6_K read as fast as those of q8_0
    sets: llama.cpp   the coder in process, beside llama.cpp built for the same set (benchmarks/peers/install.sh)
    sets: forced      every command with every name; a server that runs the kernels it was told to run

Keys end with the set that was forced. What a set gained over an earlier commit: `make compare BASE=... SET=...`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from benchmarks.packaged_models import coder_file
from benchmarks.peers import llamacpp
from benchmarks.peers.workers import Worker, quire_working, working
from benchmarks.record import ROOT
from benchmarks.rounds import measured_ratios
from proofs.cpu import neon
from proofs.framework.proof import Proof, section
from proofs.framework.rounds import judge_ratio
from tests.support.commands import leaf_commands

SETS = ("portable", "avx2", "avxvnni", "avx512", "avx512vnni", "neondot")
WITHOUT_DOT_PRODUCTS = ("avx2", "avx512")
OVER_LLAMACPP = {"1": 1.0, "4": 1.3, "16": 1.6, llamacpp.PREFILL: 1.3}
NAMES = {llamacpp.PREFILL: "prompt"}
MAX_OVER_Q8_0 = 1.18


def forced(name: str) -> Mapping[str, str]:
    """The environment in which the kernels of a set run."""
    return {**os.environ, "QUIRE_INSTRUCTION_SET": name, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


def usable() -> list[str]:
    """The sets that this processor has."""
    program = "from quire.backends.kernels.extension import availability; print(availability().isa)"
    found = []
    for name in SETS:
        ran = subprocess.run([sys.executable, "-c", program], env=forced(name), capture_output=True, text=True)
        if ran.stdout.strip() == name:
            found.append(name)
    return found


@section("sets: bits")
def bits(proof: Proof) -> None:
    """Random weights and rows; every fourth case has all codes at their largest and all inputs at 127 or -127."""
    cases = str(proof.sized(quick=20, full=200))
    neon.OWN.build()
    lines = {neon.OWN.name: neon.OWN.run("int8_fingerprints", cases)}
    if not neon.missing():
        neon.ARM.build()
        lines[neon.ARM.name] = neon.ARM.run("int8_fingerprints", cases)
    found = neon.compare(lines)
    proof.at_least("set_bits_builds", len(found.builds), 2)
    proof.at_least("set_bits_pairs", found.pairs, int(cases))
    proof.none("set_bits_unequal", found.wrong)


@section("sets: one row")
def one_row(proof: Proof) -> None:
    for name in usable():
        with working((sys.executable, "-m", "proofs.speed.one_row_worker"), forced(name)) as worker:

            def measure(worker: Worker = worker) -> list[float]:
                seconds = worker.ask({})
                return [seconds["Q4_K"] / seconds["Q8_0"], seconds["Q6_K"] / seconds["Q8_0"]]

            measure()  # memory is touched
            rows = measured_ratios(measure, None if proof.is_full else 10)
        for codes, ratios in zip(("q4_k", "q6_k"), rows, strict=True):
            most = MAX_OVER_Q8_0 if name in WITHOUT_DOT_PRODUCTS else None
            judge_ratio(proof, f"set_one_row_{codes}_{name}", ratios, at_most=most)


@section("sets: llama.cpp")
def beside_llamacpp(proof: Proof) -> None:
    load = llamacpp.Load(counts=(1, 4, 16))
    for name in WITHOUT_DOT_PRODUCTS:
        if name not in usable():
            proof.report(f"has_{name}", False)
            continue
        rates: dict[str, list[tuple[float, float]]] = {}
        with llamacpp.loaded(coder_file(), {"instruction_set": name}, max(load.counts), name) as sides:

            def measure(
                sides: llamacpp.Sides = sides, rates: dict[str, list[tuple[float, float]]] = rates
            ) -> list[float]:
                number = len(rates.get(llamacpp.PREFILL, ()))
                found = list(llamacpp.one_round(sides, number, load))
                for key, ours, theirs in found:
                    rates.setdefault(key, []).append((ours, theirs))
                return [ours / theirs for _, ours, theirs in found]

            rows = measured_ratios(measure, None if proof.is_full else 2)
        for (key, pairs), ratios in zip(rates.items(), rows, strict=True):
            word = f"{NAMES.get(key, key)}_{name}"
            judge_ratio(proof, f"set_llamacpp_{word}", ratios, at_least=OVER_LLAMACPP[key])
            proof.report(f"set_tokens_per_s_{word}", median(ours for ours, _ in pairs))
            proof.report(f"set_llamacpp_tokens_per_s_{word}", median(theirs for _, theirs in pairs))


@section("sets: speed")
def speed(proof: Proof) -> None:
    """The other sets that can be forced, alone: tokens per second of the coder."""
    load = llamacpp.Load(counts=(1, 4, 16))
    for name in (one for one in usable() if one not in WITHOUT_DOT_PRODUCTS):
        rates: dict[str, list[float]] = {}
        settings = {"memory_bytes": llamacpp.MEMORY_BYTES, "max_sequence_tokens": 1024, "instruction_set": name}
        with quire_working(coder_file(), settings) as ours:
            for _ in range(proof.sized(quick=1, full=1 if name == "portable" else 5)):
                for count in load.counts:
                    prompts = llamacpp.new_prompts(count, llamacpp.SHORT_PROMPT)
                    rates.setdefault(str(count), []).append(llamacpp.decode_rate(ours, prompts, load.output_tokens))
                prompts = llamacpp.new_prompts(1, load.prompt_tokens)
                rates.setdefault("prompt", []).append(llamacpp.prefill_rate(ours, prompts))
        for key, found in rates.items():
            proof.report(f"set_tokens_per_s_{key}_{name}", median(found))


@section("sets: forced")
def every_command(proof: Proof) -> None:
    wrong = list(_wrong_commands(proof))
    proof.none("set_forced_wrong", wrong)
    proof.holds("set_forced", not wrong, "every command takes a known set, or refuses with the list")
    doctor = _ran(("doctor",), "portable")
    proof.holds("set_portable_named", "portable kernels are in use" in doctor.stdout, "doctor names it")


def _wrong_commands(proof: Proof) -> Iterator[str]:
    here = usable()
    for words in leaf_commands():
        for name in (*SETS, "auto", "quantum", "avx"):
            ran = _ran((*words, "--help"), name)
            is_known = name in SETS or name == "auto"
            if (ran.returncode == 0) != is_known or (not is_known and ", ".join(SETS[:2]) not in ran.stderr):
                yield f"{' '.join(words)} with {name}: code {ran.returncode}"
    for name in SETS:
        ran = _ran(("doctor", "--json"), name)
        if name in here and json.loads(ran.stdout)["isa"] != name:
            yield f"doctor runs other kernels than {name}"
        if name not in here and (ran.returncode == 0 or ", ".join(reversed(here)) not in ran.stderr):
            yield f"doctor with {name}, which this processor lacks: {ran.stderr[-200:]}"


def _ran(words: tuple[str, ...], name: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "quire", *words]
    return subprocess.run(command, env=forced(name), capture_output=True, text=True, cwd=Path("/"))
