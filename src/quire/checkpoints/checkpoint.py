"""What the rest of quire knows of a model on disk."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checkpoints.stored_tensors import StoredTensor


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model in a local directory, checked: its config fits its weights. Its tokenizer was not opened: who computes
    needs none, and it takes longer to read than all the rest."""

    name: str
    """What the user called it."""
    source: Path
    """What it is opened by: its directory, or its GGUF file."""
    directory: Path
    """Config and tokenizer; the weights too, unless they are in a GGUF file."""
    config: dict[str, Any]
    """config.json without what would have code run (`auto_map`)."""
    weight_files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    """Where each tensor lies, by Hugging Face's names."""
    tokenizer_file: Path | None
    chat_template: str | None
    eos_token_ids: frozenset[int]
    """Tokens that end a text by the word of config or generation_config. `end_tokens` has them all."""
    eos_texts: frozenset[str]
    """The text of tokens that end a text by the word of the tokenizer."""
    bos_token_id: int | None
    special_tokens: dict[str, str]
    """Texts of special tokens by the names that chat templates use for them (`bos_token`, ...)."""
    generation_defaults: dict[str, float | int]
    """The model's own sampling settings; empty where it states none or asks for greedy decoding."""
    fingerprint: str
    """The same for the same config and weights, wherever they lie: part of every block's name."""
    is_for_mlx: bool = False
    """Its tensors are as mlx-lm writes them: no other backend reads them."""

    def end_tokens(self, token_to_id: Callable[[str], int | None]) -> frozenset[int]:
        """Every token that ends a text; a tokenizer knows the ids of those that are given as texts."""
        named = {token_to_id(text) for text in self.eos_texts}
        return self.eos_token_ids | {token for token in named if token is not None}

    @property
    def matrix_types(self) -> frozenset[str]:
        """The types that matrices have in the files, in the files' own words; vectors are often kept wider."""
        return frozenset(tensor.type for tensor in self.tensors.values() if len(tensor.shape) == 2)
