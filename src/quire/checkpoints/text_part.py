"""The text part of a checkpoint that also sees or hears: a `…ForConditionalGeneration` of several models in one.

Its config holds the text model's under `text_config`, and its tensors stand under a prefix. Everything else is left
out: quire serves text, and says so where the checkpoint is read.
"""

import logging
from collections.abc import Mapping
from typing import Any

from quire.checkpoints.families import FAMILIES
from quire.checkpoints.stored_tensors import StoredTensor
from quire.errors import CheckpointError

TEXT_PART = "quire_text_part_of"
"""A field that is written into the config of a text part: what it is a part of."""
PREFIXES: Mapping[str, str] = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
"""Where text models' tensors stand, and what they are called by themselves."""
INHERITED = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "tie_word_embeddings")
"""Fields that makers write beside `text_config` or in it."""

logger = logging.getLogger(__name__)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the text part, if it has one of a family that quire knows; else the config as it is."""
    inner = config.get("text_config")
    if config["model_type"] in FAMILIES or not isinstance(inner, dict) or inner.get("model_type") not in FAMILIES:
        return config
    named = config.get("architectures")
    whole = str(named[0])[:80] if isinstance(named, list) and named else config["model_type"]
    logger.warning("serving the text part of %s only; images and audio are not supported", whole)
    return {**{key: config[key] for key in INHERITED if key in config}, **inner, TEXT_PART: whole}


def text_tensors(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of the text part by the names they have in a model of text alone."""
    if TEXT_PART not in config:
        return dict(tensors)
    found = {
        new + name.removeprefix(old): tensor
        for name, tensor in tensors.items()
        for old, new in PREFIXES.items()
        if name.startswith(old)
    }
    if not found:
        missing = f"expected the text part's tensors to begin with {' or '.join(PREFIXES)}, found none"
        raise CheckpointError(f"{missing}; download the model again", code="text_part_missing")
    return found
