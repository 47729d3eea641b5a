"""A second tokenizer on the model of a first: the same ids, another name for some added tokens. May touch `tokenizers`.

The library's object holds settings (how long a text may be, which names are tokens) beside a vocabulary of many
megabytes. A twin shares the vocabulary and has settings of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken


@dataclass(frozen=True, slots=True)
class Twin:
    """A tokenizer, and which of its ids are called otherwise by the one it was made of."""

    library: tokenizers.Tokenizer
    original_ids: Mapping[int, int]


def twin_of(library: tokenizers.Tokenizer, names: Mapping[str, str]) -> Twin:
    """A twin in which added tokens have the names that are given for theirs, and others keep their own."""
    twin = tokenizers.Tokenizer(library.model)
    if library.normalizer is not None:
        twin.normalizer = library.normalizer
    if library.pre_tokenizer is not None:
        twin.pre_tokenizer = library.pre_tokenizer
    if library.post_processor is not None:
        twin.post_processor = library.post_processor
    added = sorted(library.get_added_tokens_decoder().items())
    twin.add_tokens([_renamed(token, names.get(token.content, token.content)) for _, token in added])
    ids = {twin.token_to_id(names.get(token.content, token.content)): token_id for token_id, token in added}
    return Twin(twin, {own: token_id for own, token_id in ids.items() if own is not None and own != token_id})


def _renamed(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )
