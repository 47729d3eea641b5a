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

CONVERSION_NAME = "quire.json"
MAX_TOKEN_ID = 2**31 - 1
MAX_TEMPLATE_CHARACTERS = 1_000_000
RUNS_CODE = ("auto_map", "custom_pipelines")
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
    """The location of a model's weights, and the headers that enter its fingerprint."""

    source: Path
    files: tuple[Path, ...]
    tensors: dict[str, StoredTensor]
    headers: list[Any]
    is_for_mlx: bool = False


def read_directory(directory: Path, name: str) -> Checkpoint:
    """Read the checkpoint in this directory. Raises CheckpointError if it is invalid."""
    return read_described(directory, name, lambda config: _weights_beside(config, directory))


def read_described(directory: Path, name: str, weights_of: Callable[[dict[str, Any]], Weights]) -> Checkpoint:
    """Read a checkpoint with its config and tokenizer in `directory`; `weights_of` finds the weights for the config."""
    try:
        return _read(directory, name, weights_of)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}; check that the model is there") from error


def _weights_beside(config: dict[str, Any], directory: Path) -> Weights:
    """Read the headers of the directory's weight files; validate that tensors are unique and fit the config."""
    files = open_weights(directory)
    headers = [
        [file.path.name, file.num_bytes, {name: [one.type, one.shape] for name, one in file.tensors.items()}]
        for file in files
    ]
    stored = {name: tensor for file in files for name, tensor in file.tensors.items()}
    tensors = with_joined_parts(decoder_names(config, text_tensors(config, stored)), read_quantisation(config))
    is_for_mlx = is_quantised_by_mlx(config) or any(map(_has_experts_of_mlx, files))
    if not is_for_mlx:  # mlx-lm checks its own names and shapes
        check_shapes(config, {name: tensor.shape for name, tensor in tensors.items()})
    return Weights(directory, tuple(file.path for file in files), tensors, headers, is_for_mlx)


def _has_experts_of_mlx(file: WeightFile) -> bool:
    """Whether the file has mlx-lm's expert tensors: all experts of a layer in one tensor, under mlx-lm's names."""
    return file.written_by == "mlx" and any(len(tensor.shape) > 2 for tensor in file.tensors.values())


def _read(directory: Path, name: str, weights_of: Callable[[dict[str, Any]], Weights]) -> Checkpoint:
    config = _read_config(directory)
    weights = weights_of(config)
    generation = _read_optional(directory, "generation_config.json")
    described = _read_optional(directory, "tokenizer_config.json")
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
        chat_template=_chat_template(directory, described),
        eos_token_ids=frozenset(eos),
        eos_texts=frozenset(_token_texts(described, "eos_token")),
        bos_token_id=min(bos, default=None),
        special_tokens={key: text for key in TEMPLATE_TOKENS for text in _token_texts(described, key)},
        generation_defaults=_sampling(generation),
        fingerprint=_fingerprint(config, weights.headers, _conversion(directory)),
        is_for_mlx=weights.is_for_mlx,
    )


def _read_config(directory: Path) -> dict[str, Any]:
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"expected a config.json in {directory}, found none; give the directory of a model")
    config = read_json_object(directory / "config.json")
    if not isinstance(config.get("model_type"), str):
        rule = "expected config.json to name a model_type that needs no code of its own"
        way_out = "quire never runs code from a model's directory; choose a model that transformers supports"
        raise CheckpointError(f"{rule}; {way_out}", code="invalid_model_type")
    return text_config({key: value for key, value in config.items() if key not in RUNS_CODE})


def _read_optional(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    return read_json_object(path) if path.is_file() else {}


def _token_ids(source: dict[str, Any], key: str) -> set[int]:
    value = source.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            rule = f"a token id from 0 to {MAX_TOKEN_ID:,} or a list of them, got {str(value)[:60]!r}"
            raise CheckpointError(f"expected {key} to be {rule}; download the model again", code=f"invalid_{key}")
    return set(ids)


def _token_texts(described: dict[str, Any], key: str) -> list[str]:
    """Return a token's text from tokenizer_config.json, where it is a string or an object with `content`."""
    value = described.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return []
    if not isinstance(text, str):
        rule = f"tokenizer_config.json: expected {key} to be a string, got {type(text).__name__}"
        raise CheckpointError(f"{rule}; download the model again", code=f"invalid_{key}")
    return [text]


def _chat_template(directory: Path, described: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    template: Any = described.get("chat_template")
    if path.is_file():
        try:
            template = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            why = f"expected {path.name} to be valid UTF-8; download the model again"
            raise CheckpointError(why, code="invalid_template") from error
    if isinstance(template, list):
        template = _default_template(template)
    if template is None:
        return None
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE_CHARACTERS:
        rule = f"expected the chat template to be a string of at most {MAX_TEMPLATE_CHARACTERS:,} characters"
        raise CheckpointError(f"{rule}; download the model again", code="invalid_template")
    return template


def _default_template(templates: list[Any]) -> Any:
    """Return the template named "default" from a list, otherwise the first."""
    if not templates or not all(isinstance(item, dict) and "name" in item and "template" in item for item in templates):
        rule = "tokenizer_config.json: expected chat_template to be a string or a list of {name, template}"
        raise CheckpointError(f"{rule}; download the model again", code="invalid_template")
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
            rule = f"generation_config.json: expected {key} from {low:g} to {high:g}, got {str(value)[:40]!r}"
            raise CheckpointError(f"{rule}; correct it, or download the model again", code=f"invalid_{key}")
        defaults[key] = value
    return defaults


def _conversion(directory: Path) -> list[Any]:
    """Return the fingerprint fields of a converted GGUF model: a content digest, as files may have equal shapes."""
    written = _read_optional(directory, CONVERSION_NAME)
    return [written.get("format_version"), written.get("source_digest")]


def _fingerprint(config: dict[str, Any], headers: list[Any], conversion: list[Any]) -> str:
    parts = [canonical_json(config), canonical_json(conversion), *(canonical_json(header) for header in headers)]
    state = blake2b(digest_size=32, person=b"quire.model")
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


# -- names of tensors --------------------------------------------------------------------------------------------------

FUSED_EXPERTS = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)")
"""Expert weights fused into one tensor [expert, out, in]; gate and up are concatenated along `out`."""


def decoder_names(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Rename tensors to the names in the family's row of `FAMILIES`; split fused experts and drop ignored tensors."""
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
