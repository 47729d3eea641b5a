"""Beside llama.cpp and OpenVINO GenAI, each on the same file as ours, in process, turn about.

Peers are installed by `benchmarks/peers/install.sh`; one that is not there is told and proves nothing.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

from benchmarks.bench_models import bench_model
from benchmarks.packaged_models import coder_file
from benchmarks.peers import __main__ as peers
from benchmarks.peers import llamacpp
from benchmarks.peers.llamacpp import PREFILL, Load
from benchmarks.record import say
from benchmarks.test_model import smollm2_file
from proofs.cpu.loading import AUTO
from proofs.framework.proof import Proof, section
from proofs.framework.ratios import spread

CODER_BOUNDS = {"1": 1.3, "4": 1.8, "16": 2.0, "32": 2.0, PREFILL: 1.8}
OPENVINO_BOUND = 1.1
FILES: Mapping[str, Callable[[], Path]] = {
    "coder": coder_file,
    "1b": lambda: bench_model("1b"),
    "smollm2": smollm2_file,
}


@section("beside llama.cpp")
def llama_cpp(proof: Proof) -> None:
    """Output tokens per second of some sequences at once, and of one long prompt, ours over theirs."""
    is_there = llamacpp.python() is not None
    proof.report("has_llamacpp", is_there, "benchmarks/peers/install.sh llamacpp")
    if not is_there:
        return
    load = Load(output_tokens=proof.sized(quick=9, full=33), prompt_tokens=proof.sized(quick=128, full=512))
    for name in FILES if proof.is_full else ("smollm2", "coder"):
        rounds = _rounds(FILES[name](), load, proof.sized(quick=2, full=5))
        for count, pairs in rounds.items():
            _report(proof, f"llamacpp_{count}_{name}", pairs, CODER_BOUNDS[count] if name == "coder" else None)


def _rounds(file: Path, load: Load, count: int) -> dict[str, list[tuple[float, float]]]:
    """Ours and theirs of each figure, round by round, after one that does not count."""
    found: dict[str, list[tuple[float, float]]] = {}
    with llamacpp.loaded(file, AUTO) as sides:
        list(llamacpp.one_round(sides, 0, Load(counts=(1,), output_tokens=3, prompt_tokens=32)))
        for number in range(count):
            for name, ours, theirs in llamacpp.one_round(sides, number, load):
                found.setdefault(name, []).append((ours, theirs))
                say(f"  {file.name[:24]} {name:8} ours {ours:8.1f}   theirs {theirs:8.1f}   {ours / theirs:5.2f}")
    return found


def _report(proof: Proof, key: str, pairs: list[tuple[float, float]], least: float | None) -> None:
    """The ratio of medians, and both of them."""
    ours, theirs = (median(side) for side in zip(*pairs, strict=True))
    told = f"{ours:.1f} / {theirs:.1f} tokens/s"
    if least is None:
        proof.report(key, ours / theirs, told)
    else:
        proof.at_least(key, ours / theirs, least, told)
    proof.report(f"{key}_spread", spread([one / other for one, other in pairs]))
    proof.report(f"{key}_ours", ours, "tokens/s")
    proof.report(f"{key}_theirs", theirs, "tokens/s")


@section("beside OpenVINO GenAI")
def openvino(proof: Proof) -> None:
    """The test model's 4-bit file in process, as in `make peers`, both with its weights as they are."""
    is_there = (peers.folder("openvino") / "bin" / "python").exists()
    proof.report("has_openvino", is_there, "benchmarks/peers/install.sh openvino")
    if not is_there:
        return
    ratios = peers.Ratios()
    peers.openvino_rounds(ratios, proof.sized(quick=2, full=5), "openvino", smollm2_file(), "auto")
    for count in peers.OPENVINO_COUNTS:
        key = f"openvino_{count}"
        _report(proof, key, list(zip(ratios.ours[key], ratios.theirs[key], strict=True)), OPENVINO_BOUND)
