"""What makers call tensors, and what the decoder calls them: names of other families' parts, parts that are not used,
and experts that are one tensor where others have one each."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from quire.checkpoints.families import FAMILIES
from quire.checkpoints.families.family import Family
from quire.checkpoints.stored_tensors import FLOAT_BYTES, StoredTensor

FUSED_EXPERTS = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)")
"""[expert, out, in], as newer makers store them; gate and up one below the other."""


def decoder_names(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by the names that the family's row of the table has for them."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return dict(tensors)
    return {
        new: tensor
        for name, stored in tensors.items()
        if not (family.ignored and name.startswith(family.ignored))
        for new, tensor in _split(family, _renamed(family, name), stored)
    }


def _renamed(family: Family, name: str) -> str:
    for old, new in family.stored_names.items():
        if old in name:
            return name.replace(old, new, 1)
    return name


def _split(family: Family, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    fused = FUSED_EXPERTS.fullmatch(name)
    if fused is None or family.experts is None or not family.experts.gate or len(tensor.shape) != 3:
        yield name, tensor
        return
    kinds = (family.experts.gate, family.experts.up) if fused[2] == "gate_up_proj" else (family.experts.down,)
    num_experts, height, width = tensor.shape
    if height % len(kinds) or tensor.type not in FLOAT_BYTES:
        yield name, tensor
        return
    num_bytes = tensor.num_bytes // (num_experts * len(kinds))
    for at in range(num_experts * len(kinds)):
        expert, kind = divmod(at, len(kinds))
        part = replace(
            tensor, shape=(height // len(kinds), width), offset=tensor.offset + at * num_bytes, num_bytes=num_bytes
        )
        yield f"{fused[1]}{kinds[kind].format(expert)}.weight", part
