"""Every instruction set that can be forced on this machine: the same bits, its speed, and its speed against llama.cpp.

    sets: bits        products of all builds, also with extreme values, against the portable one
    sets: one row     weights of Q4_K and Q6_K are read as fast as those of q8_0
    sets: llama.cpp   the coder model against llama.cpp built for the same set (benchmarks/peers/install.sh)
    sets: forced      every command with every name of a set; the doctor must report the forced kernels

Keys end with the forced set. `make compare BASE=... SET=...` compares a set with that of an earlier commit.
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


def environment_of(name: str) -> Mapping[str, str]:
    """Return an environment that forces the kernels of a set."""
    return {**os.environ, "QUIRE_INSTRUCTION_SET": name, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


def usable_sets() -> list[str]:
    """Return the sets that this processor supports."""
    program = "from quire.backends.kernels.extension import availability; print(availability().isa)"
    names = []
    for name in SETS:
        command, environment = [sys.executable, "-c", program], environment_of(name)
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        names += [name] if process.stdout.strip() == name else []
    return names


@section("sets: bits")
def bits(proof: Proof) -> None:
    """Random weights and rows; in every fourth case all codes are maximal and all inputs are 127 or -127."""
    cases = str(proof.sized(quick=20, full=200))
    neon.OWN.build()
    lines = {neon.OWN.name: neon.OWN.run("int8_fingerprints", cases)}
    if not neon.missing():
        neon.ARM.build()
        lines[neon.ARM.name] = neon.ARM.run("int8_fingerprints", cases)
    result = neon.compare(lines)
    proof.at_least("set_bits_builds", len(result.builds), 2)
    proof.at_least("set_bits_pairs", result.pairs, int(cases))
    proof.none("set_bits_unequal", result.wrong)


@section("sets: one row")
def one_row(proof: Proof) -> None:
    for name in usable_sets():
        with working((sys.executable, "-m", "proofs.speed.one_row_worker"), environment_of(name)) as worker:

            def measure(worker: Worker = worker) -> list[float]:
                seconds = worker.ask({})
                return [seconds["Q4_K"] / seconds["Q8_0"], seconds["Q6_K"] / seconds["Q8_0"]]

            measure()  # a warm-up
            rows = measured_ratios(measure, None if proof.is_full else 10)
        for codes, ratios in zip(("q4_k", "q6_k"), rows, strict=True):
            bound = MAX_OVER_Q8_0 if name in WITHOUT_DOT_PRODUCTS else None
            judge_ratio(proof, f"set_one_row_{codes}_{name}", ratios, at_most=bound)


@section("sets: llama.cpp")
def beside_llamacpp(proof: Proof) -> None:
    load = llamacpp.Load(counts=(1, 4, 16))
    for name in WITHOUT_DOT_PRODUCTS:
        if name not in usable_sets():
            proof.report(f"has_{name}", False)
            continue
        rates: dict[str, list[tuple[float, float]]] = {}
        with llamacpp.loaded(coder_file(), {"instruction_set": name}, max(load.counts), name) as engines:

            def measure(
                engines: llamacpp.Sides = engines, rates: dict[str, list[tuple[float, float]]] = rates
            ) -> list[float]:
                number = len(rates.get(llamacpp.PREFILL, ()))
                results = list(llamacpp.one_round(engines, number, load))
                for key, ours, theirs in results:
                    rates.setdefault(key, []).append((ours, theirs))
                return [ours / theirs for _, ours, theirs in results]

            rows = measured_ratios(measure, None if proof.is_full else 2)
        for (key, pairs), ratios in zip(rates.items(), rows, strict=True):
            suffix = f"{NAMES.get(key, key)}_{name}"
            judge_ratio(proof, f"set_llamacpp_{suffix}", ratios, at_least=OVER_LLAMACPP[key])
            proof.report(f"set_tokens_per_s_{suffix}", median(ours for ours, _ in pairs))
            proof.report(f"set_llamacpp_tokens_per_s_{suffix}", median(theirs for _, theirs in pairs))


@section("sets: speed")
def speed(proof: Proof) -> None:
    """Tokens per second of the coder model with all other sets that can be forced."""
    load = llamacpp.Load(counts=(1, 4, 16))
    for name in (one for one in usable_sets() if one not in WITHOUT_DOT_PRODUCTS):
        rates: dict[str, list[float]] = {}
        settings = {"memory_bytes": llamacpp.MEMORY_BYTES, "max_sequence_tokens": 1024, "instruction_set": name}
        with quire_working(coder_file(), settings) as ours:
            for _ in range(proof.sized(quick=1, full=1 if name == "portable" else 5)):
                for count in load.counts:
                    prompts = llamacpp.new_prompts(count, llamacpp.SHORT_PROMPT)
                    rates.setdefault(str(count), []).append(llamacpp.decode_rate(ours, prompts, load.output_tokens))
                prompts = llamacpp.new_prompts(1, load.prompt_tokens)
                rates.setdefault("prompt", []).append(llamacpp.prefill_rate(ours, prompts))
        for key, values in rates.items():
            proof.report(f"set_tokens_per_s_{key}_{name}", median(values))


@section("sets: forced")
def every_command(proof: Proof) -> None:
    wrong = list(_wrong_commands(proof))
    proof.none("set_forced_wrong", wrong)
    proof.holds("set_forced", not wrong, "every command accepts a known set, or refuses with the list of sets")
    doctor = _run_quire(("doctor",), "portable")
    proof.holds("set_portable_named", "portable kernels are in use" in doctor.stdout, "doctor names it")


def _wrong_commands(proof: Proof) -> Iterator[str]:
    sets_here = usable_sets()
    for words in leaf_commands():
        for name in (*SETS, "auto", "quantum", "avx"):
            process = _run_quire((*words, "--help"), name)
            is_known = name in SETS or name == "auto"
            if (process.returncode == 0) != is_known or (not is_known and ", ".join(SETS[:2]) not in process.stderr):
                yield f"{' '.join(words)} with {name}: code {process.returncode}"
    for name in SETS:
        process = _run_quire(("doctor", "--json"), name)
        if name in sets_here and json.loads(process.stdout)["isa"] != name:
            yield f"doctor reports other kernels than {name}"
        if name not in sets_here and (process.returncode == 0 or ", ".join(reversed(sets_here)) not in process.stderr):
            yield f"doctor with {name}, which this processor lacks: {process.stderr[-200:]}"


def _run_quire(words: tuple[str, ...], name: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "quire", *words]
    return subprocess.run(command, env=environment_of(name), capture_output=True, text=True, cwd=Path("/"))
