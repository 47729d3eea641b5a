"""Quantized weights in safetensors: reads their settings from config.json, and joins the tensors of each weight.

    scheme          tensors of a weight, by the last component of their names
    gptq            qweight [in / words, out], qzeros, scales, g_idx
    awq             qweight [in, out / 8], qzeros, scales
    pack-quantized  weight_packed [out, in / words], weight_scale, weight_shape, weight_zero_point, weight_g_idx
    fp8             weight (F8_E4M3), weight_scale or weight_scale_inv
    mxfp4           NAME_blocks [expert, out, group, 16], NAME_scales [expert, out, group]
    mlx             weight [..., out, in / words] (U32), scales, biases; any number of bits, which layers may override

"in / words" stands for the number of 32-bit words that hold the codes of all inputs. This module joins the tensors of a
weight to one StoredTensor with the shape that the model family expects. Backends decode the codes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.checkpoints.families.config_fields import config_error
from quire.checkpoints.stored_tensors import StoredTensor
from quire.errors import CheckpointError

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
ORIGINAL_HINT = "choose the model's original weights, or a GGUF file"
MAX_GROUP_SIZE = 1 << 20
MXFP4_GROUP = 32
MLX_BITS = (2, 3, 4, 5, 6, 8)
MAIN_PARTS = {"gptq": "qweight", "awq": "qweight", "pack-quantized": "weight_packed", "fp8": "weight"}
"""The tensor of a weight that has the quantized codes, by scheme."""
OTHER_PARTS = {
    "gptq": ("qzeros", "scales", "g_idx"),
    "awq": ("qzeros", "scales"),
    "pack-quantized": ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    "fp8": ("weight_scale", "weight_scale_inv"),
}
NUM_REQUIRED_PARTS = {"gptq": 2, "awq": 2, "pack-quantized": 2, "fp8": 0}
"""Number of leading entries of `OTHER_PARTS` that are required."""
UNUSED_PARTS = ("input_scale", "k_scale", "v_scale")
"""Scales of activations and of the KV cache. quire ignores them, because it quantizes neither with stored scales."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The quantization settings of a model's weights."""

    scheme: str
    num_bits: int
    group_size: int | None
    """Number of inputs that share a scale; None: one scale for all inputs of an output."""
    is_symmetric: bool = True
    zeros_are_less_one: bool = False
    """Whether stored zero points are one less than their value, as in GPTQ's first file format."""


def is_quantised_by_mlx(config: Mapping[str, Any]) -> bool:
    """Whether the config is in MLX's format: settings under `quantization`, without `quant_method`."""
    return isinstance(config.get("quantization"), dict) and "quant_method" not in config["quantization"]


def read_quantisation(config: Mapping[str, Any]) -> Quantisation | None:
    """Read the quantization settings; None for unquantized weights. Raises CheckpointError for unsupported settings."""
    if is_quantised_by_mlx(config):
        section = config["quantization"]
        return Quantisation("mlx", _num_bits(section, "bits", MLX_BITS), _group_size(section))
    section = config.get("quantization_config")
    if section is None:
        return None
    method = section.get("quant_method") if isinstance(section, dict) else None
    match method:
        case "gptq":
            _refuse(bool(section.get("desc_act")), "groups of neighbouring inputs (desc_act false)", "scattered_groups")
            num_bits, is_v1 = _num_bits(section, "bits", (4, 8)), section.get("checkpoint_format", "gptq") == "gptq"
            return Quantisation("gptq", num_bits, _group_size(section), zeros_are_less_one=is_v1)
        case "awq":
            _refuse(str(section.get("version", "gemm")).lower() != "gemm", "AWQ of version gemm", "awq_not_gemm")
            return Quantisation("awq", _num_bits(section, "bits", (4,)), _group_size(section))
        case "compressed-tensors":
            return _read_compressed_tensors(section)
        case "fp8":
            return Quantisation("fp8", 8, _block_side(section.get("weight_block_size")))
        case "mxfp4":
            return Quantisation("mxfp4", 4, MXFP4_GROUP)
    expected = f"quant_method to be one of {', '.join(METHODS)}, got {str(method)[:40]!r}"
    raise config_error("unsupported_quantisation", expected, ORIGINAL_HINT)


def with_joined_parts(
    tensors: Mapping[str, StoredTensor], quantisation: Quantisation | None
) -> dict[str, StoredTensor]:
    """Join the tensors of each quantized weight into one StoredTensor, under the name of the unquantized weight."""
    if quantisation is None:
        return dict(tensors)
    if quantisation.scheme == "mxfp4":
        return _with_joined_mxfp4(tensors)
    if quantisation.scheme == "mlx":
        return _with_joined_mlx(tensors, quantisation)
    main_part, other_parts = MAIN_PARTS[quantisation.scheme], OTHER_PARTS[quantisation.scheme]
    joined = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in UNUSED_PARTS}
    for name in list(joined):
        base, _, suffix = name.rpartition(".")
        if suffix != main_part or (quantisation.scheme == "fp8" and joined[name].type != "F8_E4M3"):
            continue
        parts = {part: joined.pop(f"{base}.{part}") for part in (main_part, *other_parts) if f"{base}.{part}" in joined}
        joined[f"{base}.weight"] = _joined_weight(base, parts, quantisation)
    return joined


def _with_joined_mxfp4(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Join the MXFP4 tensors of experts. The result has the name and shape [expert, in, out] of unquantized experts."""
    joined = dict(tensors)
    for name in [name for name in tensors if name.endswith("_blocks")]:
        base = name.removesuffix("_blocks")
        blocks, scales = joined.pop(name), joined.pop(f"{base}_scales", None)
        if scales is None or len(blocks.shape) != 4 or blocks.shape != (*scales.shape, MXFP4_GROUP // 2):
            raise CheckpointError(
                f"expected {name[:100]!r} to have blocks [expert, out, group, {MXFP4_GROUP // 2}] and scales, got "
                f"{list(blocks.shape)} and {None if scales is None else list(scales.shape)}; download the model again"
            )
        num_experts, num_out, num_groups = scales.shape
        parts, num_bytes = (("blocks", blocks), ("scales", scales)), blocks.num_bytes + scales.num_bytes
        shape = (num_experts, num_groups * MXFP4_GROUP, num_out)
        joined[base] = replace(blocks, type="MXFP4", shape=shape, num_bytes=num_bytes, parts=parts)
    return joined


def _with_joined_mlx(tensors: Mapping[str, StoredTensor], quantisation: Quantisation) -> dict[str, StoredTensor]:
    """Join the tensors of MLX weights: 32-bit words that hold the codes of several inputs, and a scale per input group.
    The number of bits may differ per layer; mlx-lm checks the number against the model."""
    joined = dict(tensors)
    for name in [name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.type == "U32"]:
        base = name.removesuffix(".weight")
        part_names = [part for part in ("weight", "scales", "biases") if f"{base}.{part}" in joined]
        parts = {part: joined.pop(f"{base}.{part}") for part in part_names}
        codes = parts["weight"]
        if "scales" not in parts or len(parts["scales"].shape) != len(codes.shape):
            message = f"expected scales for the quantised weight {base[:100]!r}, found none; download the model again"
            raise CheckpointError(message, code="scales_missing")
        num_code_bits, num_inputs = codes.shape[-1] * 32, parts["scales"].shape[-1] * (quantisation.group_size or 0)
        if not num_inputs or num_code_bits / num_inputs not in MLX_BITS:  # the layer has a different group size
            num_inputs = num_code_bits // quantisation.num_bits
        shape, num_bytes = (*codes.shape[:-1], num_inputs), sum(part.num_bytes for part in parts.values())
        type_name = f"MLX{num_code_bits // max(1, num_inputs)}"
        joined[name] = replace(codes, type=type_name, shape=shape, num_bytes=num_bytes, parts=tuple(parts.items()))
    return joined


def _joined_weight(base: str, parts: dict[str, StoredTensor], quantisation: Quantisation) -> StoredTensor:
    scheme = quantisation.scheme
    missing = [part for part in OTHER_PARTS[scheme][: NUM_REQUIRED_PARTS[scheme]] if part not in parts]
    if missing or len(parts) < 2 or len(parts[MAIN_PARTS[scheme]].shape) != 2:
        raise CheckpointError(
            f"expected the quantised weight {base[:100]!r} to be a matrix with {', '.join(OTHER_PARTS[scheme])}, got "
            f"{', '.join(parts)}; download the model again"
        )
    codes = parts[MAIN_PARTS[scheme]]
    rows, columns = codes.shape
    codes_per_word = 32 // quantisation.num_bits
    shape = {
        "gptq": (columns, rows * codes_per_word),
        "awq": (columns * codes_per_word, rows),
        "pack-quantized": (rows, columns * codes_per_word),
        "fp8": (rows, columns),
    }[scheme]
    type_name = "FP8_E4M3" if scheme == "fp8" else f"INT{quantisation.num_bits}"
    num_bytes = sum(part.num_bytes for part in parts.values())
    return replace(codes, type=type_name, shape=shape, num_bytes=num_bytes, parts=tuple(parts.items()))


def _read_compressed_tensors(config: Mapping[str, Any]) -> Quantisation:
    groups = config.get("config_groups")
    _refuse(
        not isinstance(groups, dict) or len(groups) != 1, "one config_group for all weights", "several_config_groups"
    )
    (group,) = groups.values() if isinstance(groups, dict) else ({},)
    weights = group.get("weights") if isinstance(group, dict) else None
    packing = (group.get("format") if isinstance(group, dict) else None) or config.get("format")
    if not isinstance(weights, dict) or packing not in ("pack-quantized", "float-quantized"):
        expected = f"compressed-tensors of format pack-quantized or float-quantized, got {str(packing)[:40]!r}"
        raise config_error("unsupported_packing", expected, ORIGINAL_HINT)
    if packing == "float-quantized":
        _refuse(weights.get("type") != "float" or weights.get("num_bits") != 8, "floats of 8 bits", "not_8_bit_floats")
        is_block = weights.get("strategy") == "block"
        return Quantisation("fp8", 8, _block_side(weights.get("block_structure")) if is_block else None)
    _refuse(weights.get("type", "int") != "int", "whole numbers", "not_whole_numbers")
    is_scattered = weights.get("actorder") not in (None, False, "weight", "static")
    _refuse(is_scattered, "groups of neighbouring inputs", "scattered_groups")
    is_channel = weights.get("strategy") == "channel"
    size, num_bits = None if is_channel else _group_size(weights), _num_bits(weights, "num_bits", (4, 8))
    return Quantisation("pack-quantized", num_bits, size, weights.get("symmetric") is not False)


def _num_bits(config: Mapping[str, Any], key: str, allowed: tuple[int, ...]) -> int:
    bits = config.get(key)
    if type(bits) is not int or bits not in allowed:
        expected = f"quantised weights of {' or '.join(map(str, allowed))} bits, got {str(bits)[:40]!r}"
        raise config_error("unsupported_num_bits", expected, "choose the model in another format")
    return bits


def _group_size(config: Mapping[str, Any]) -> int | None:
    size = config.get("group_size")
    if size is None or (type(size) is int and size == -1):
        return None
    if type(size) is not int or not 1 <= size <= MAX_GROUP_SIZE:
        expected = f"group_size to be -1 or a whole number from 1 to {MAX_GROUP_SIZE:,}, got {str(size)[:40]!r}"
        raise config_error("invalid_group_size", expected)
    return size


def _block_side(block_size: Any) -> int | None:
    """Return the side of the square blocks that share a scale; None without blocks."""
    if block_size is None:
        return None
    is_square = isinstance(block_size, list) and len(block_size) == 2 and block_size[0] == block_size[1]
    _refuse(not is_square, "square blocks", "blocks_not_square")
    return _group_size({"group_size": block_size[0]})


def _refuse(is_unsupported: bool, expected: str, code: str) -> None:
    if is_unsupported:
        raise config_error(code, f"quantised weights with {expected}, got others", ORIGINAL_HINT)
