"""Extracts the text model of a multimodal checkpoint (`…ForConditionalGeneration`).

Such a checkpoint has the text model's config under `text_config` and its tensors under a prefix. All other parts are
ignored, because quire serves text only; it logs a warning when it reads the checkpoint.
"""

import logging
from collections.abc import Mapping
from typing import Any

from quire.checkpoints.families import FAMILIES
from quire.checkpoints.stored_tensors import StoredTensor
from quire.errors import CheckpointError

TEXT_PART = "quire_text_part_of"
"""Field that quire adds to the config of an extracted text model: the architecture of the whole checkpoint."""
PREFIXES: Mapping[str, str] = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
"""Prefix of text tensors in a multimodal checkpoint -> prefix in a text model."""
INHERITED_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "tie_word_embeddings")
"""Fields that are copied from the top level of the config unless `text_config` has them."""

logger = logging.getLogger(__name__)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the text model if quire supports only the text model's family; otherwise `config` itself."""
    inner = config.get("text_config")
    if config["model_type"] in FAMILIES or not isinstance(inner, dict) or inner.get("model_type") not in FAMILIES:
        return config
    names = config.get("architectures")
    full_model = str(names[0])[:80] if isinstance(names, list) and names else config["model_type"]
    logger.warning("serving the text part of %s only; images and audio are not supported", full_model)
    return {**{key: config[key] for key in INHERITED_FIELDS if key in config}, **inner, TEXT_PART: full_model}


def text_tensors(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the text model's tensors, renamed as in a text-only model. Raises CheckpointError if there are none."""
    if TEXT_PART not in config:
        return dict(tensors)
    renamed = {
        new + name.removeprefix(old): tensor
        for name, tensor in tensors.items()
        for old, new in PREFIXES.items()
        if name.startswith(old)
    }
    if not renamed:
        message = f"expected the text part's tensors to begin with {' or '.join(PREFIXES)}, found none"
        raise CheckpointError(f"{message}; download the model again", code="text_part_missing")
    return renamed
