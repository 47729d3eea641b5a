"""What a token of any decoder takes in its layers, and how many tokens a model was made for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one token takes in one layer."""

    num_kv_heads: int
    key_size: int
    value_size: int

    @property
    def num_values(self) -> int:
        """Numbers per token: its keys and its values."""
        return self.num_kv_heads * (self.key_size + self.value_size)


def num_block_bytes(shapes: Sequence[LayerShape], block_size: int, value_bytes: int, scale_bytes: int = 0) -> int:
    """Bytes of one block over all layers. `scale_bytes`: beside each head's key, and beside its value."""
    values = sum(shape.num_values for shape in shapes) * value_bytes
    scales = sum(2 * shape.num_kv_heads for shape in shapes) * scale_bytes
    return (values + scales) * block_size


def model_tokens(config: Mapping[str, Any]) -> int:
    """The longest sequence a model was made for, as far as its config says."""
    for fields in (config, config.get("text_config")):
        tokens = (
            fields.get("max_position_embeddings", fields.get("n_positions")) if isinstance(fields, Mapping) else None
        )
        if isinstance(tokens, int) and tokens >= 1:
            return tokens
    return 2048
