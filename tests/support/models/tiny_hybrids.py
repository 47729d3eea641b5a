"""Hybrids of a few kilobytes: one in a directory that can be served, and any config with random weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from quire.checkpoints.families import expected_shapes, read_shape
from tests.support.models.tiny_models import Array, Tiny, make_directory

CONTEXT = 512


def make_hybrid(folder: Path) -> Path:
    """Short convolutions beside one layer of attention: config, tokenizer and random weights."""
    make_directory(folder, tiny=Tiny())
    config = json.loads((folder / "config.json").read_text())
    config = {
        "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "vocab_size": config["vocab_size"],
        "hidden_size": 64, "intermediate_size": 96, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention", "conv"],
        "max_position_embeddings": CONTEXT, "tie_word_embeddings": True, "eos_token_id": config["eos_token_id"],
    }  # fmt: skip
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    return write_model(folder, config, random_tensors(config, seed=25))


def random_tensors(config: Mapping[str, Any], seed: int) -> dict[str, Array]:
    """All that the decoder needs, by the names that it has for them."""
    dice = np.random.default_rng(seed)
    return {
        name: (dice.standard_normal(shape) * 0.3 + ("norm" in name)).astype(np.float32)
        for name, shape in expected_shapes(read_shape(config)).items()
    }


def write_model(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> Path:
    """A directory without a tokenizer, unless it has one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder
