"""Compares published 4-bit weights with transformers, which reads the same file and widens its weights to float32."""

import gc
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from benchmarks.packaged_models import coder_file, gemma_file
from proofs.cpu.loading import AUTO, load_decoder, opened
from proofs.cpu.perplexity import fixed_text, perplexity
from proofs.framework.proof import Proof, section

FILES: Mapping[str, Callable[[], Path]] = {"gemma": gemma_file, "coder": coder_file}
NUM_TOKENS, BOUND = 2_048, 0.005
ARITHMETICS = {"float": {"arithmetic": "float", "kv_dtype": "float32"}, "served": {}}
"""Settings: float arithmetic, where nothing is rounded twice, and the defaults of the server."""


@section("real weights")
def real_weights(proof: Proof) -> None:
    """Perplexity of a fixed text, relative to transformers on the same weights."""
    max_change = 0.0
    for name in FILES if proof.is_full else ("gemma",):
        file = FILES[name]()
        tokens = fixed_text(opened(file))[: proof.sized(quick=256, full=NUM_TOKENS)]
        expected = _reference(file, tokens)
        for kind, settings in ARITHMETICS.items():
            kv_dtype = "float32" if kind == "float" else "bfloat16"
            actual = perplexity(load_decoder(file, **AUTO, **settings), tokens, kv_dtype)  # type: ignore[arg-type]
            gc.collect()
            note = f"{actual:.4f} over {expected:.4f}, minus 1"
            proof.report(f"real_weights_{name}_{kind}", actual / expected - 1.0, note)
            max_change = max(max_change, abs(actual / expected - 1.0)) if kind == "float" else max_change
    proof.at_most("real_weights", max_change, BOUND, "in float arithmetic, the larger change of both models")


@torch.inference_mode()
def _reference(file: Path, tokens: list[int]) -> float:
    """Return the perplexity with transformers, from the same file."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    result = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if result.unexpected_keys or set(result.missing_keys) - tied:
        raise RuntimeError(f"expected transformers to load all tensors of {file.name}, got {result}")
    model.tie_weights()
    ids = torch.tensor([tokens])
    logits = model(ids).logits[0, :-1].double()
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    del model
    gc.collect()
    return float(loss.exp())
