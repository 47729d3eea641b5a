"""Reads and validates a model directory in Hugging Face format. Never executes code from it."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from quire.checkpoints.checkpoint import Checkpoint
from quire.checkpoints.families import FAMILIES, check_shapes
from quire.checkpoints.families.family import Family
from quire.checkpoints.quantisation import is_quantised_by_mlx, read_quantisation, with_joined_parts
from quire.checkpoints.stored_tensors import FLOAT_BYTES, StoredTensor
from quire.checkpoints.strict_json import canonical_json, read_json_object
from quire.checkpoints.text_part import text_config, text_tensors
from quire.checkpoints.weights import WeightFile, open_weights
from quire.errors import CheckpointError

CONVERSION_NAME = "quire.json"  # in the folder of a converted GGUF model: format version and content digest
MAX_TOKEN_ID = 2**31 - 1
MAX_TEMPLATE_CHARACTERS = 1_000_000
CODE_FIELDS = ("auto_map", "custom_pipelines")  # they name Python code of the model, which quire never runs
SAMPLING_LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (0, MAX_TOKEN_ID),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3),
}

TEMPLATE_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weight files and tensors. `headers` are hashed into the fingerprint, `source` is Checkpoint's."""

    source: Path
    files: tuple[Path, ...]
    tensors: dict[str, StoredTensor]
    headers: list[Any]
    is_for_mlx: bool = False


def read_directory(directory: Path, name: str) -> Checkpoint:
    """Read the checkpoint in this directory. Raises CheckpointError if it is invalid."""
    return read_described(directory, name, lambda config: _weights_in(config, directory))


def read_described(directory: Path, name: str, weights_of: Callable[[dict[str, Any]], Weights]) -> Checkpoint:
    """Read a checkpoint whose config and tokenizer are in `directory`; `weights_of(config)` returns its weights."""
    try:
        return _read(directory, name, weights_of)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}; check that the model is there") from error


def _weights_in(config: dict[str, Any], directory: Path) -> Weights:
    """Read the headers of the directory's weight files; validate that tensors are unique and fit the config."""
    files = open_weights(directory)
    headers = [
        [file.path.name, file.num_bytes, {name: [tensor.type, tensor.shape] for name, tensor in file.tensors.items()}]
        for file in files
    ]
    stored = {name: tensor for file in files for name, tensor in file.tensors.items()}
    tensors = with_joined_parts(decoder_names(config, text_tensors(config, stored)), read_quantisation(config))
    is_for_mlx = is_quantised_by_mlx(config) or any(map(_has_experts_of_mlx, files))
    if not is_for_mlx:  # the MLX backend loads the model with mlx-lm, which checks names and shapes itself
        check_shapes(config, {name: tensor.shape for name, tensor in tensors.items()})
    return Weights(directory, tuple(file.path for file in files), tensors, headers, is_for_mlx)


def _has_experts_of_mlx(file: WeightFile) -> bool:
    """Whether the file has mlx-lm's expert tensors: all experts of a layer in one tensor, under mlx-lm's names."""
    return file.written_by == "mlx" and any(len(tensor.shape) > 2 for tensor in file.tensors.values())


def _read(directory: Path, name: str, weights_of: Callable[[dict[str, Any]], Weights]) -> Checkpoint:
    config = _read_config(directory)
    weights = weights_of(config)
    generation = _read_optional(directory, "generation_config.json")
    tokenizer_config = _read_optional(directory, "tokenizer_config.json")
    tokenizer_file = directory / "tokenizer.json"
    eos = _token_ids(config, "eos_token_id") | _token_ids(generation, "eos_token_id")
    bos = _token_ids(generation, "bos_token_id") or _token_ids(config, "bos_token_id")
    return Checkpoint(
        name=name,
        source=weights.source,
        directory=directory,
        config=config,
        weight_files=weights.files,
        tensors=weights.tensors,
        tokenizer_file=tokenizer_file if tokenizer_file.is_file() else None,
        chat_template=_chat_template(directory, tokenizer_config),
        eos_token_ids=frozenset(eos),
        eos_texts=frozenset(_token_texts(tokenizer_config, "eos_token")),
        bos_token_id=min(bos, default=None),
        special_tokens={key: text for key in TEMPLATE_TOKENS for text in _token_texts(tokenizer_config, key)},
        generation_defaults=_sampling(generation),
        fingerprint=_fingerprint(config, weights.headers, _conversion(directory)),
        is_for_mlx=weights.is_for_mlx,
    )


def _read_config(directory: Path) -> dict[str, Any]:
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"expected a config.json in {directory}, found none; pass a model's directory")
    config = read_json_object(directory / "config.json")
    if not isinstance(config.get("model_type"), str):
        message = "expected config.json to name a model_type that needs no code of its own"
        hint = "quire never runs code from a model's directory; choose a model that transformers supports"
        raise CheckpointError(f"{message}; {hint}", code="invalid_model_type")
    return text_config({key: value for key, value in config.items() if key not in CODE_FIELDS})


def _read_optional(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    return read_json_object(path) if path.is_file() else {}


def _token_ids(source: dict[str, Any], key: str) -> set[int]:
    value = source.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            expected = f"a token id from 0 to {MAX_TOKEN_ID:,} or a list of them, got {str(value)[:60]!r}"
            raise CheckpointError(f"expected {key} to be {expected}; download the model again", code=f"invalid_{key}")
    return set(ids)


def _token_texts(tokenizer_config: dict[str, Any], key: str) -> list[str]:
    """Return a list with a token's text, empty if it has none. The field is a string or an object with `content`."""
    value = tokenizer_config.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return []
    if not isinstance(text, str):
        message = f"tokenizer_config.json: expected {key} to be a string, got {type(text).__name__}"
        raise CheckpointError(f"{message}; download the model again", code=f"invalid_{key}")
    return [text]


def _chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    template: Any = tokenizer_config.get("chat_template")
    if path.is_file():
        try:
            template = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            message = f"expected {path.name} to be valid UTF-8; download the model again"
            raise CheckpointError(message, code="invalid_template") from error
    if isinstance(template, list):
        template = _default_template(template)
    if template is None:
        return None
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE_CHARACTERS:
        message = f"expected the chat template to be a string of at most {MAX_TEMPLATE_CHARACTERS:,} characters"
        raise CheckpointError(f"{message}; download the model again", code="invalid_template")
    return template


def _default_template(templates: list[Any]) -> Any:
    """Return the template named "default", or the first of the list if none has this name."""
    if not templates or not all(isinstance(item, dict) and "name" in item and "template" in item for item in templates):
        message = "tokenizer_config.json: expected chat_template to be a string or a list of {name, template}"
        raise CheckpointError(f"{message}; download the model again", code="invalid_template")
    return next((item["template"] for item in templates if item["name"] == "default"), templates[0]["template"])


def _sampling(generation: dict[str, Any]) -> dict[str, float | int]:
    if generation.get("do_sample") is False:
        return {}
    defaults: dict[str, float | int] = {}
    for key, (low, high) in SAMPLING_LIMITS.items():
        value = generation.get(key)
        if value is None:
            continue
        if type(value) not in (int, float) or not low <= value <= high:
            message = f"generation_config.json: expected {key} from {low:g} to {high:g}, got {str(value)[:40]!r}"
            raise CheckpointError(f"{message}; correct it, or download the model again", code=f"invalid_{key}")
        defaults[key] = value
    return defaults


def _conversion(directory: Path) -> list[Any]:
    """Return what identifies a converted GGUF model: two models with equal config and shapes differ in their digest."""
    conversion = _read_optional(directory, CONVERSION_NAME)
    return [conversion.get("format_version"), conversion.get("source_digest")]


def _fingerprint(config: dict[str, Any], headers: list[Any], conversion: list[Any]) -> str:
    parts = [canonical_json(config), canonical_json(conversion), *(canonical_json(header) for header in headers)]
    state = blake2b(digest_size=32, person=b"quire.model")
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


# -- tensor names ------------------------------------------------------------------------------------------------------

FUSED_EXPERTS = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)")
"""Expert weights fused into one tensor [expert, out, in]; gate and up are concatenated along `out`."""


def decoder_names(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Rename tensors as the family's row of `FAMILIES` says, split fused experts, and drop ignored tensors."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return dict(tensors)
    return {
        new: tensor
        for name, stored in tensors.items()
        if not (family.ignored and name.startswith(family.ignored))
        for new, tensor in _split_experts(family, _new_name(family, name), stored)
    }


def _new_name(family: Family, name: str) -> str:
    for old, new in family.stored_names.items():
        if old in name:
            return name.replace(old, new, 1)
    return name


def _split_experts(family: Family, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    match = FUSED_EXPERTS.fullmatch(name)
    if match is None or family.experts is None or not family.experts.gate or len(tensor.shape) != 3:
        yield name, tensor
        return
    templates = (family.experts.gate, family.experts.up) if match[2] == "gate_up_proj" else (family.experts.down,)
    num_experts, height, width = tensor.shape
    if height % len(templates) or tensor.type not in FLOAT_BYTES:
        yield name, tensor
        return
    num_bytes = tensor.num_bytes // (num_experts * len(templates))
    shape = (height // len(templates), width)
    for index in range(num_experts * len(templates)):
        expert, number = divmod(index, len(templates))
        part = replace(tensor, shape=shape, offset=tensor.offset + index * num_bytes, num_bytes=num_bytes)
        yield f"{match[1]}{templates[number].format(expert)}.weight", part
