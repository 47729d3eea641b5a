"""A model's words that an operator gives a gateway, because members that are not quire send none.

Reads disks and perhaps a network: not for an event loop.
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
from quire.fleet.protocol.messages import ModelWords
from quire.fleet.protocol.text_assets import words_of
from quire.text.tokenizer import Tokenizer

DEFAULT_SEQUENCE_TOKENS = 4096
"""Where neither the model nor the server says how long a sequence may be."""
MAX_PROBE_BYTES = 4096
"""Of texts by which tokenizers are compared."""


@dataclass(frozen=True, slots=True)
class GivenWords:
    """What is known of a model that nobody here computes."""

    words: ModelWords
    tokenizer: Tokenizer
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class StrangerRules:
    """What a gateway's operator says of members that are not quire."""

    words: GivenWords | None = None
    allows_clear: bool = False
    """Whether they may be spoken to in clear beyond this machine."""


def read_words(model: str) -> GivenWords:
    """The words of a model: a directory, a .gguf file, or a hub id. Raises CheckpointError."""
    checkpoint = resolve(model)
    words = words_of(checkpoint, ModelSettings())
    texts = {**checkpoint.config, **(checkpoint.config.get("text_config") or {})}
    return given_words(words, texts.get("vocab_size"), texts.get("max_position_embeddings"))


def given_words(words: ModelWords, num_rows: object = None, max_sequence_tokens: object = None) -> GivenWords:
    """The same of words that are there already. A model may have more rows than its tokenizer has tokens."""
    tokenizer = tokenizer_of(words).limited(MAX_PROBE_BYTES, MAX_PROBE_BYTES)
    name = blake2b(words.tokenizer_json, digest_size=16).hexdigest()
    info = ModelInfo(
        ModelIdentity(f"tokenizer {name}", "not known"),
        DEFAULT_BLOCK_SIZE,
        1,
        max(tokenizer.vocabulary_size, num_rows if isinstance(num_rows, int) else 0),
        max_sequence_tokens if isinstance(max_sequence_tokens, int) else DEFAULT_SEQUENCE_TOKENS,
    )
    return GivenWords(words, tokenizer, info)


def tokenizer_of(words: ModelWords) -> Tokenizer:
    """The library reads files only."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        file.write_bytes(words.tokenizer_json)
        return Tokenizer.from_files(file, MAX_BYTES_PER_TOKEN)
