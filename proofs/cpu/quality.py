"""What formats and arithmetics cost in quality: perplexity of a fixed text, over that of the same weights in float32.

float   weights as the file has them, widened in registers
int8    the same, rows rounded to 8 bits for integer products
kv8     float, keys and values in 8 bits
"""

import gc
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from benchmarks.bench_models import smollm2_as
from benchmarks.packaged_models import coder_file
from proofs.cpu.loading import AUTO, FLOAT32, load_decoder, opened
from proofs.cpu.perplexity import fixed_text, perplexity
from proofs.framework.proof import Proof, section
from quire.config import Dtype

NUM_TOKENS = 2_048
BOUNDS = {"float": 0.001, "int8": 0.01, "kv8": 0.01}
MODELS: Mapping[str, Callable[[], Path]] = {
    "smollm2_q8_0": lambda: smollm2_as("Q8_0"),
    "smollm2_q4_0": lambda: smollm2_as("Q4_0"),
    "coder_q4_k_m": coder_file,
}
KV8: Dtype = "int8"  # type: ignore[assignment]


@section("quality of formats")
def formats(proof: Proof) -> None:
    """Weights as the file has them, in both arithmetics."""
    _judge(proof, {"float": ("float", "float32"), "int8": ("int8", "float32")})


@section("quality of 8-bit keys and values")
def kv8(proof: Proof) -> None:
    """In float arithmetic, so that nothing else differs."""
    _judge(proof, {"kv8": ("float", KV8)})


def _judge(proof: Proof, ways: Mapping[str, tuple[str, Dtype]]) -> None:
    """Ways are an arithmetic and how KV is held. The worst model's change, up or down, is held to the bound."""
    changes: dict[str, list[float]] = {kind: [] for kind in ways}
    for name in MODELS if proof.is_full else list(MODELS)[:2]:
        file = MODELS[name]()
        tokens = _tokens(file, proof.sized(quick=256, full=NUM_TOKENS))
        expected = float32_perplexity(file, tuple(tokens))
        for kind, (arithmetic, kv_dtype) in ways.items():
            held = {**AUTO, "arithmetic": arithmetic, "kv_dtype": kv_dtype}
            found = perplexity(load_decoder(file, **held), tokens, kv_dtype)
            gc.collect()
            changes[kind].append(abs(found / expected - 1.0))
            told = f"{found:.4f} over {expected:.4f}, minus 1"
            proof.report(f"perplexity_{kind}_{name}", found / expected - 1.0, told)
    for kind, values in changes.items():
        proof.at_most(f"perplexity_{kind}", max(values), BOUNDS[kind])


def _tokens(file: Path, num_tokens: int) -> list[int]:
    tokens = fixed_text(opened(file))[:num_tokens]
    if len(tokens) < num_tokens:
        raise RuntimeError(f"the text must have {num_tokens} tokens, it has {len(tokens)}")
    return tokens


@cache
def float32_perplexity(file: Path, tokens: tuple[int, ...]) -> float:
    """Of the same weights as float32 numbers, computed in float32."""
    found = perplexity(load_decoder(file, **FLOAT32), list(tokens), "float32")
    gc.collect()
    return found
