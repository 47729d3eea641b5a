"""Greedy tokens of hybrids against transformers in float32, from safetensors and from GGUF files, as `models_parity`
does it for the other families."""

from benchmarks.record import say
from proofs.llamacpp_converter import convert
from proofs.models_parity import SETTINGS
from proofs.proof import Proof, section
from proofs.torch_backend import Parity, compare_tiny
from quire.checkpoints.families import FAMILIES
from tests.support import architectures
from tests.support.models import load_runner

NOT_IN_GGUF = {
    "qwen3-next-mixed": "the format has no dense layer between layers of experts",
    "lfm2-moe-scaled": "the converter leaves the factor of experts out: published models have none",
    "granite4-turned": "the format's hybrids of this family have no positions",
}
"""What the format does not have, and why."""


@section("parity with transformers")
def parity(proof: Proof) -> None:
    """All hybrids as they come in both kinds of files."""
    found, in_files = Parity(), 0
    for name in architectures.HYBRIDS:
        compare_tiny(proof, found, name, load_runner(architectures.directory(name), **SETTINGS))
        if name in NOT_IN_GGUF:
            say(f"  {name}: not in GGUF: {NOT_IN_GGUF[name]}")
            continue
        file = convert(architectures.directory(name), proof.folder / f"{name}.gguf")
        compare_tiny(proof, found, name, load_runner(file, **SETTINGS))
        in_files += 1
    families = {kind for kind, _ in architectures.HYBRIDS.values()}
    known = {name for name, family in FAMILIES.items() if family.recurrent is not None}
    proof.equals("parity_families", len(families), len(known), "all hybrids of the table")
    proof.report("parity_gguf_models", in_files, "by llama.cpp's own converter")
    proof.report("parity_tokens", found.num_tokens)
    proof.report("parity_near_ties", found.num_near_ties, "counted apart")
    proof.equals("parity_mismatches", found.num_mismatches, 0)
