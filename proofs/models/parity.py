"""Greedy tokens of every family against transformers in float32: from safetensors, and from GGUF files.

Weights are random, and shapes are as irregular as the families allow. llama.cpp's own converter writes the GGUF files,
so that they are equal to published ones.
"""

from collections.abc import Mapping, Sequence

from benchmarks.record import say
from proofs.framework.proof import Proof, section
from proofs.models.llamacpp_converter import convert
from proofs.numerics.torch_backend import TINY_SETTINGS, Parity, compare_tiny
from quire.checkpoints.families import FAMILIES
from tests.support.models import architectures
from tests.support.models.models import load_runner

MODELS = architectures.NATIVE | architectures.TODAY
SETTINGS = {**TINY_SETTINGS, "backend": "cpu", "dtype": "float32", "block_size": 16}
NOT_IN_GGUF = {
    "mistral-native": "the converter leaves its window out: such files are read as Llama",
    "qwen3-moe-mixed": "the format has no dense layer between layers of experts",
}
"""Models that GGUF files cannot hold, and the reason."""


@section("parity with transformers")
def parity(proof: Proof) -> None:
    """All families, from both kinds of files."""
    families = {kind for kind, _ in MODELS.values()}
    plain = {name for name, family in FAMILIES.items() if family.recurrent is None}
    proof.equals("parity_families", len(families), len(plain), "all of the table except hybrids")
    compare_files(proof, list(MODELS), NOT_IN_GGUF)


def compare_files(proof: Proof, models: Sequence[str], not_in_gguf: Mapping[str, str]) -> None:
    """Compare tokens of these models from safetensors files and, except `not_in_gguf`, from GGUF files."""
    counts, num_gguf = Parity(), 0
    for name in models:
        compare_tiny(proof, counts, name, load_runner(architectures.directory(name), **SETTINGS))
        if name in not_in_gguf:
            say(f"  {name}: not in GGUF: {not_in_gguf[name]}")
            continue
        file = convert(architectures.directory(name), proof.folder / f"{name}.gguf")
        compare_tiny(proof, counts, name, load_runner(file, **SETTINGS))
        num_gguf += 1
    proof.report("parity_gguf_models", num_gguf, "by llama.cpp's own converter")
    proof.report("parity_tokens", counts.num_tokens)
    proof.report("parity_near_ties", counts.num_near_ties, "counted separately")
    proof.equals("parity_mismatches", counts.num_mismatches, 0)
