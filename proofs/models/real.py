"""Real weights in 4 bits against transformers, which reads the same file and widens its weights to float32."""

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
NUM_TOKENS = 2_048
BOUND = 0.005
ARITHMETICS = {"float": {"arithmetic": "float", "kv_dtype": "float32"}, "served": {}}
"""In float arithmetic, where nothing is rounded twice, and as it is served by default."""


@section("real weights")
def real_weights(proof: Proof) -> None:
    """Perplexity of a fixed text, over transformers' on the same weights."""
    worst = 0.0
    for name in FILES if proof.is_full else ("gemma",):
        file = FILES[name]()
        tokens = fixed_text(opened(file))[: proof.sized(quick=256, full=NUM_TOKENS)]
        expected = _reference(file, tokens)
        for kind, settings in ARITHMETICS.items():
            kv_dtype = "float32" if kind == "float" else "bfloat16"
            found = perplexity(load_decoder(file, **AUTO, **settings), tokens, kv_dtype)  # type: ignore[arg-type]
            gc.collect()
            told = f"{found:.4f} over {expected:.4f}, minus 1"
            proof.report(f"real_weights_{name}_{kind}", found / expected - 1.0, told)
            worst = max(worst, abs(found / expected - 1.0)) if kind == "float" else worst
    proof.at_most("real_weights", worst, BOUND, "in float arithmetic, the worst of both")


@torch.inference_mode()
def _reference(file: Path, tokens: list[int]) -> float:
    """Of transformers' own reading of the file."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    told = model.load_state_dict(tensors, strict=False)
    if told.unexpected_keys or set(told.missing_keys) - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        raise RuntimeError(f"transformers reads other tensors of {file.name} than it needs: {told}")
    model.tie_weights()
    ids = torch.tensor([tokens])
    logits = model(ids).logits[0, :-1].double()
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    del model
    gc.collect()
    return float(loss.exp())
