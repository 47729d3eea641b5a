"""The conformance kit and parity with transformers, as in proof-torch, for the CPU backend."""

from dataclasses import replace
from pathlib import Path

from proofs.framework.proof import Proof, section
from proofs.numerics.torch_backend import compare_models, report_parity
from quire.backends.conformance.contract import CHECKS, check_all
from tests.support.models import architectures
from tests.support.models.models import runners_of
from tests.support.models.tiny_models import Tiny, make_directory, write_gguf

SETTINGS = {
    "memory_bytes": 8 << 30, "block_size": 16, "max_step_tokens": 128, "max_running": 16, "max_sequence_tokens": 1024,
    "backend": "cpu",
}  # fmt: skip
CONTEXT = 1024
MODELS = {
    "llama": Tiny(hidden=96, num_heads=3, num_kv_heads=1, num_layers=3, intermediate=160),
    "mistral": Tiny(hidden=160, num_heads=4, num_kv_heads=4, metadata={"llama.attention.sliding_window": 45}),
    "qwen2": Tiny("qwen2", hidden=96, num_heads=2, num_kv_heads=1, num_layers=3, intermediate=64),
    "qwen3": Tiny("qwen3", hidden=128, num_heads=2, num_kv_heads=1, num_layers=2, intermediate=96, tied=False),
}
DTYPES = ("float32", "bfloat16")
KV_DTYPES = ("float32", "bfloat16", "int8")
FILE_TYPES = ("Q8_0", "Q4_0", "Q4_1")
"""Types of files whose weights are not converted."""


@section("conformance")
def conformance(proof: Proof) -> None:
    """Run every check for every family and type of weights, and for quantised files with every type of KV."""
    results = [
        check_all(
            runners_of(make_directory(proof.folder / name, tiny=_long(MODELS[name])), **{**SETTINGS, "dtype": dtype})
        )
        for name in MODELS
        for dtype in DTYPES
    ]
    for type_name in FILE_TYPES:
        file = _file(proof.folder, type_name)
        results += [
            check_all(runners_of(file, **{**SETTINGS, "dtype": "auto", "kv_dtype": kv_dtype})) for kv_dtype in KV_DTYPES
        ]
    proof.report("conformance_models", len(results))
    proof.holds("conformance", all(len(one) == len(CHECKS) for one in results), "the kit passes: every check for each")


def _file(folder: Path, type_name: str) -> Path:
    return write_gguf(folder / f"{type_name}.gguf", replace(_long(MODELS["llama"]), kind=type_name))


def _long(tiny: Tiny) -> Tiny:
    return replace(tiny, metadata={**tiny.metadata, f"{tiny.arch}.context_length": CONTEXT})


@section("parity with transformers")
def parity(proof: Proof) -> None:
    """Greedy tokens in float32 of the test model and of every family whose shapes the kernels support."""
    report_parity(proof, compare_models(proof, tuple(architectures.NATIVE), backend="cpu", dtype="float32"))
