"""The tokens of the small tokenizer that tests talk with, as grammars see them."""

from functools import cache

from llguidance import LLTokenizer

from quire.checkpoints.grammar_vocabulary import grammar_vocabulary
from tests.support.models.small_tokenizers import byte_level

END_ID = byte_level().vocabulary_size - 1
"""What ends a text, as `talkers` has it."""


@cache
def small_vocabulary() -> LLTokenizer:
    library = byte_level().library
    return grammar_vocabulary(library.to_str(), byte_level().vocabulary_size, [END_ID])
