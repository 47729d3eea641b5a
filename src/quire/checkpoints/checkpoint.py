"""The description of a model on disk that the rest of quire uses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checkpoints.stored_tensors import StoredTensor


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk whose config was validated against its weights. Its tokenizer is not opened: workers need none,
    and reading a tokenizer takes longer than reading all other files here."""

    name: str
    """The name that the user passed."""
    source: Path
    """The path to open: the directory, or the GGUF file."""
    directory: Path
    """The directory of config and tokenizer, and of the weights unless they are in a GGUF file."""
    config: dict[str, Any]
    """config.json without fields that request custom code (`auto_map`, `custom_pipelines`)."""
    weight_files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    """Tensor locations, by Hugging Face names."""
    tokenizer_file: Path | None
    chat_template: str | None
    eos_token_ids: frozenset[int]
    """EOS token ids from config and generation_config. `end_tokens` adds the ids of `eos_texts`."""
    eos_texts: frozenset[str]
    """Texts of EOS tokens from the tokenizer's config."""
    bos_token_id: int | None
    special_tokens: dict[str, str]
    """Texts of special tokens, by their names in chat templates (`bos_token`, ...)."""
    generation_defaults: dict[str, float | int]
    """The model's default sampling settings; empty if it has none or requests greedy decoding."""
    fingerprint: str
    """Hash of config and weight headers, independent of the directory. Part of every KV block's digest."""
    is_for_mlx: bool = False
    """Whether the tensors are in mlx-lm's layout, which only the MLX backend reads."""

    def end_tokens(self, token_to_id: Callable[[str], int | None]) -> frozenset[int]:
        """Return all EOS token ids; `token_to_id` resolves those in `eos_texts`."""
        ids = {token_to_id(text) for text in self.eos_texts}
        return self.eos_token_ids | {token for token in ids if token is not None}

    @property
    def matrix_types(self) -> frozenset[str]:
        """The stored types of all matrices, in the file format's terms. Vectors often have wider types."""
        return frozenset(tensor.type for tensor in self.tensors.values() if len(tensor.shape) == 2)
