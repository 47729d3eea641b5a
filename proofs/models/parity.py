"""Greedy tokens of every family against transformers in float32: from safetensors, and from GGUF files.

Weights are random, and shapes as odd as the families allow. The GGUF files are made by llama.cpp's own converter: what
is read is what people have, not what we believe it to be.
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
    "mistral-native": "the converter leaves its window out: such files are Llama's",
    "qwen3-moe-mixed": "the format has no dense layer between layers of experts",
}
"""What the format does not have, and why."""


@section("parity with transformers")
def parity(proof: Proof) -> None:
    """All families as they come in both kinds of files."""
    families = {kind for kind, _ in MODELS.values()}
    plain = {name for name, family in FAMILIES.items() if family.recurrent is None}
    proof.equals("parity_families", len(families), len(plain), "all of the table but hybrids")
    compare_files(proof, list(MODELS), NOT_IN_GGUF)


def compare_files(proof: Proof, models: Sequence[str], not_in_gguf: Mapping[str, str]) -> None:
    """Tokens of these models from safetensors and, but for some, from GGUF files."""
    found, in_files = Parity(), 0
    for name in models:
        compare_tiny(proof, found, name, load_runner(architectures.directory(name), **SETTINGS))
        if name in not_in_gguf:
            say(f"  {name}: not in GGUF: {not_in_gguf[name]}")
            continue
        file = convert(architectures.directory(name), proof.folder / f"{name}.gguf")
        compare_tiny(proof, found, name, load_runner(file, **SETTINGS))
        in_files += 1
    proof.report("parity_gguf_models", in_files, "by llama.cpp's own converter")
    proof.report("parity_tokens", found.num_tokens)
    proof.report("parity_near_ties", found.num_near_ties, "counted apart")
    proof.equals("parity_mismatches", found.num_mismatches, 0)
