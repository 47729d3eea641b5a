"""A hybrid of a few kilobytes in a directory that can be served: short convolutions beside one layer of attention."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from quire.checkpoints.families import expected_shapes, read_shape
from tests.support.tiny_models import Tiny, make_directory

CONTEXT = 512


def make_hybrid(folder: Path) -> Path:
    """Config, tokenizer and random weights, by the names that the decoder has for them."""
    make_directory(folder, tiny=Tiny())
    config = json.loads((folder / "config.json").read_text())
    config = {
        "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "vocab_size": config["vocab_size"],
        "hidden_size": 64, "intermediate_size": 96, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention", "conv"],
        "max_position_embeddings": CONTEXT, "tie_word_embeddings": True, "eos_token_id": config["eos_token_id"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    dice = np.random.default_rng(25)
    tensors = {
        name: (dice.standard_normal(shape) * 0.3 + ("norm" in name)).astype(np.float32)
        for name, shape in expected_shapes(read_shape(config)).items()
    }
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    save_file(tensors, folder / "model.safetensors")
    return folder
