"""Loads a model's text assets (tokenizer, chat template) from the operator's source: OpenAI members send none.

All functions block on disk I/O, and perhaps on network I/O.
"""

import tempfile
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from quire.checkpoints import resolve
from quire.client.request.text_model import MAX_BYTES_PER_TOKEN
from quire.config import ModelSettings
from quire.engine.engine import ModelIdentity, ModelInfo
from quire.fleet.openai.metrics import DEFAULT_BLOCK_SIZE
from quire.fleet.protocol.messages import TextAssets
from quire.fleet.protocol.text_assets import text_assets_of
from quire.text.tokenizer import Tokenizer

DEFAULT_SEQUENCE_TOKENS = 4096
"""Maximum sequence length if the model's config has none."""
MAX_PROBE_BYTES = 4096
"""Limit of texts for the tokenizer, which only encodes the probe text of `model_card`."""


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """A model's text assets, tokenizer and estimated info, for fleets without quire members."""

    text_assets: TextAssets
    tokenizer: Tokenizer
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class OpenAIMemberRules:
    """An operator's settings for OpenAI members."""

    tokenizer_source: TokenizerSource | None = None
    allows_clear: bool = False
    """Whether unencrypted connections to OpenAI members on other machines are allowed."""


def read_tokenizer_source(model: str) -> TokenizerSource:
    """Load the text assets of a model (a directory, a .gguf file, or a Hub id). Raises CheckpointError."""
    checkpoint = resolve(model)
    text_assets = text_assets_of(checkpoint, ModelSettings())
    config = {**checkpoint.config, **(checkpoint.config.get("text_config") or {})}
    return tokenizer_source_of(text_assets, config.get("vocab_size"), config.get("max_position_embeddings"))


def tokenizer_source_of(
    text_assets: TextAssets, num_rows: object = None, max_sequence_tokens: object = None
) -> TokenizerSource:
    """Build a source from loaded assets. The model's vocabulary `num_rows` may be larger than the tokenizer's."""
    tokenizer = tokenizer_of(text_assets).limited(MAX_PROBE_BYTES, MAX_PROBE_BYTES)
    name = blake2b(text_assets.tokenizer_json, digest_size=16).hexdigest()
    info = ModelInfo(
        ModelIdentity(f"tokenizer {name}", "not known"),
        DEFAULT_BLOCK_SIZE,
        1,
        max(tokenizer.vocabulary_size, num_rows if isinstance(num_rows, int) else 0),
        max_sequence_tokens if isinstance(max_sequence_tokens, int) else DEFAULT_SEQUENCE_TOKENS,
    )
    return TokenizerSource(text_assets, tokenizer, info)


def tokenizer_of(text_assets: TextAssets) -> Tokenizer:
    """Load a tokenizer through a temporary file, because the library reads only files."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        file.write_bytes(text_assets.tokenizer_json)
        return Tokenizer.from_files(file, MAX_BYTES_PER_TOKEN)
