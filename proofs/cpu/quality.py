"""Loss of quality by formats and arithmetics: perplexity of a fixed text, relative to the same weights in float32.

float   weights in the format of the file, widened in registers
int8    the same weights, with rows rounded to 8 bits for integer products
kv8     as float, with keys and values in 8 bits
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
    """Weights in the format of the file, in both arithmetics."""
    _judge(proof, {"float": ("float", "float32"), "int8": ("int8", "float32")})


@section("quality of 8-bit keys and values")
def kv8(proof: Proof) -> None:
    """8-bit keys and values in float arithmetic, so that nothing else differs."""
    _judge(proof, {"kv8": ("float", KV8)})


def _judge(proof: Proof, variants: Mapping[str, tuple[str, Dtype]]) -> None:
    """Judge variants (an arithmetic and a type of KV) by the largest change of perplexity over all models."""
    changes: dict[str, list[float]] = {kind: [] for kind in variants}
    for name in MODELS if proof.is_full else list(MODELS)[:2]:
        file = MODELS[name]()
        tokens = _tokens(file, proof.sized(quick=256, full=NUM_TOKENS))
        expected = float32_perplexity(file, tuple(tokens))
        for kind, (arithmetic, kv_dtype) in variants.items():
            settings = {**AUTO, "arithmetic": arithmetic, "kv_dtype": kv_dtype}
            actual = perplexity(load_decoder(file, **settings), tokens, kv_dtype)
            gc.collect()
            changes[kind].append(abs(actual / expected - 1.0))
            note = f"{actual:.4f} over {expected:.4f}, minus 1"
            proof.report(f"perplexity_{kind}_{name}", actual / expected - 1.0, note)
    for kind, values in changes.items():
        proof.at_most(f"perplexity_{kind}", max(values), BOUNDS[kind])


def _tokens(file: Path, num_tokens: int) -> list[int]:
    tokens = fixed_text(opened(file))[:num_tokens]
    if len(tokens) < num_tokens:
        raise RuntimeError(f"expected a text of at least {num_tokens} tokens, got {len(tokens)}")
    return tokens


@cache
def float32_perplexity(file: Path, tokens: tuple[int, ...]) -> float:
    """Return the perplexity of the same weights, converted to float32."""
    result = perplexity(load_decoder(file, **FLOAT32), list(tokens), "float32")
    gc.collect()
    return result
