"""`quire info MODEL`: facts of a model and its KV capacity, from the config and weight headers, not the weights."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.shared.flags import with_chosen_settings
from quire.config import ModelSettings, Settings

if TYPE_CHECKING:
    from quire.checkpoints import Checkpoint
    from quire.checkpoints.families import DecoderShape
    from quire.checkpoints.stored_tensors import StoredTensor

    Tensors = Mapping[str, StoredTensor]

EPILOG = """\
\b
A hub id that is not on this machine is fetched first; quire models lists
the models on this machine.
\b
Examples:
  quire info org/name
  quire info ./models/my-model
  quire info ./models/my-model --dtype bfloat16
  quire info model.gguf --json
"""
GIB = 1 << 30
BUDGETS_GIB = (2, 4, 8, 16, 32)
OVERHEAD_BYTES = GIB // 2
"""Estimated memory of libraries and steps; loading a model measures the actual amount."""
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALE_BYTES = {"int8": 4}
"""Bytes of quantization scales per key vector and per value vector of a head."""
SHOWN_KV_DTYPES = ("float32", "bfloat16")
BANDWIDTH_SHARE = 0.75
"""Share of the memory bandwidth that a single request uses, as measured in docs/concepts/speed.md."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PER_LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"


@dataclass(frozen=True, slots=True)
class Fit:
    """Estimated capacity of one memory budget."""

    memory_gib: int
    kv_tokens: int
    """Number of tokens whose KV fits; 0: too little memory is left after the weights."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a model before it is loaded. A value is None if config.json lacks it or quire cannot derive it."""

    name: str
    path: str
    family: str
    architecture: str | None
    layers: int | None
    heads: int | None
    kv_heads: int | None
    head_size: int | None
    context_tokens: int | None
    vocabulary: int | None
    parameters: int
    weight_bytes: int
    weight_types: tuple[str, ...]
    read_bytes_per_token: int | None
    """Weight bytes read per decode step of a single request; they limit its speed."""
    kv_bytes_per_token: Mapping[str, int] | None
    state_bytes_per_sequence: int | None
    """Bytes of the state of recurrent layers; 0: the model has no recurrent layers."""
    has_chat_template: bool
    end_tokens: Mapping[int, str]
    """Texts of end tokens by id; empty texts if the model has no tokenizer."""
    dtype: str
    """Dtype of weights that `fits` assumes; `kv_dtype` is the dtype of keys and values."""
    kv_dtype: str
    fits: tuple[Fit, ...] | None
    parts: tuple[str, ...]
    """Features of the model beyond a plain decoder, as phrases."""
    not_supported: str | None
    """A feature of the model that the CPU backend lacks; transformers may support it."""
    is_for_mlx: bool
    """True if the weights are in mlx-lm's format, which only the MLX backend supports."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Estimated speed of a single request on this machine; None: unknown."""

    memory_bytes_per_s: float | None
    """Memory bandwidth, measured by this command."""
    tokens_per_s: float | None


@with_chosen_settings("dtype", "arithmetic", "kv_dtype")
def info(
    settings: Settings,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory, a .gguf file, or a hub id (org/name).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; unknown values are null.")] = False,
) -> None:
    """Show the facts of a model and how much of it fits into memory.

    The number of KV tokens per memory size is an estimate for the types that serving would use; loading the model
    measures it.
    """
    from quire.backends.kernels.bandwidth import bandwidth_bytes_per_s

    facts = facts_of(_resolve(model), settings.model)
    speed = _speed(facts.read_bytes_per_token, bandwidth_bytes_per_s() if settings.model.device == "cpu" else None)
    if as_json:
        typer.echo(json.dumps({**asdict(facts), **asdict(speed)}))
    else:
        _print_tables(facts, speed)


def _resolve(model: str) -> "Checkpoint":
    from quire.checkpoints import CheckpointError, resolve
    from quire.cli.shared.background import with_progress

    _report_fetch(model)
    try:
        return with_progress(lambda report: resolve(model, progress=report))
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"reading a model needs the package {error.name}, which is not installed; reinstall quire"
        ) from error


def _report_fetch(model: str) -> None:
    from quire.checkpoints.hub.files import HubName

    if (name := HubName.parse(model)) is not None and not Path(model).exists() and not name.folder.is_dir():
        typer.echo(f"{model} is not on this machine: fetching it from the Hugging Face hub", err=True)


def facts_of(checkpoint: "Checkpoint", settings: ModelSettings = ModelSettings()) -> Facts:  # noqa: B008 - immutable
    """Derive the facts from a checkpoint's config and the headers of its weights."""
    from quire.checkpoints.families import feature_phrases, why_not_decoder
    from quire.checkpoints.text_part import TEXT_PART

    config = checkpoint.config
    settings = settings.with_kv_dtype(checkpoint.matrix_types)
    weight_dtype = settings.dtype
    shape, weights = _shape_and_tensors(checkpoint)
    num_values = sum(math.prod(tensor.shape) for tensor in weights.values())
    text_parts = [f"the text part of {config[TEXT_PART]}"] if TEXT_PART in config else []
    return Facts(
        name=checkpoint.name,
        path=str(checkpoint.source),
        family=str(config["model_type"]),
        architecture=_architecture(config),
        layers=_count(config, "num_hidden_layers"),
        heads=_count(config, "num_attention_heads"),
        kv_heads=shape.num_kv_heads if shape else _count(config, "num_key_value_heads"),
        head_size=shape.head_size if shape else _count(config, "head_dim"),
        context_tokens=_count(config, "max_position_embeddings"),
        vocabulary=_count(config, "vocab_size"),
        parameters=num_values,
        weight_bytes=sum(tensor.num_bytes for tensor in checkpoint.tensors.values()),
        weight_types=tuple(sorted({tensor.type for tensor in weights.values()})),
        read_bytes_per_token=_read_bytes(shape, weights, weight_dtype) if shape and not checkpoint.is_for_mlx else None,
        kv_bytes_per_token={dtype: _kv_bytes(shape, dtype) for dtype in SHOWN_KV_DTYPES} if shape else None,
        state_bytes_per_sequence=shape.state_bytes if shape else None,
        has_chat_template=checkpoint.chat_template is not None,
        end_tokens=_end_tokens(checkpoint),
        dtype=weight_dtype,
        kv_dtype=settings.kv_dtype,
        fits=_fits(shape, weights, settings, _count(config, "max_position_embeddings")) if shape else None,
        parts=(*text_parts, *(feature_phrases(shape) if shape else ())),
        not_supported=why_not_decoder(config),
        is_for_mlx=checkpoint.is_for_mlx,
    )


def _shape_and_tensors(checkpoint: "Checkpoint") -> "tuple[DecoderShape | None, Tensors]":
    """Return a decoder's shape and the tensors it uses. For an unknown model family, return None and all tensors."""
    from quire.checkpoints.families import expected_shapes, is_decoder, read_shape

    config, tensors = checkpoint.config, checkpoint.tensors
    shape = read_shape(config) if is_decoder(config) else None
    if shape is None or checkpoint.is_for_mlx:
        return shape, tensors
    return shape, {name: tensors[name] for name in expected_shapes(shape)}


def _read_bytes(shape: "DecoderShape", weights: "Tensors", dtype: str) -> int:
    """Return the weight bytes that a decode step of a single request reads: all matrices, but only the active experts.
    Per-layer embeddings, and an embedding that is not also the head, are excluded: a step reads few of their rows."""
    experts = _expert_names(shape)
    skipped = {PER_LAYER_EMBEDDING, EMBEDDING if HEAD in weights else "", *experts}
    dense_bytes = sum(
        _loaded_bytes(one, dtype) for name, one in weights.items() if len(one.shape) > 1 and name not in skipped
    )
    expert_bytes = sum(_loaded_bytes(weights[name], dtype) for name in experts)
    mixtures = [layer.mixture for layer in shape.layers if layer.mixture]
    return dense_bytes + (expert_bytes * mixtures[0].num_used // mixtures[0].num_experts if mixtures else 0)


def _expert_names(shape: "DecoderShape") -> frozenset[str]:
    from quire.checkpoints.families.tensors import matrices_of

    names: set[str] = set()
    for layer in shape.layers:
        experts = matrices_of(shape, layer).experts
        if experts is not None:
            names.update(matrix.name for matrix in (*experts.gate, *experts.up, *experts.down))
    return frozenset(names)


def _architecture(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def _count(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int else None


def _kv_bytes(shape: "DecoderShape", dtype: str) -> int:
    layers = [layer for layer in shape.layers if layer.has_kv]
    return sum(
        2 * layer.num_kv_heads * (layer.head_size * VALUE_BYTES[dtype] + SCALE_BYTES.get(dtype, 0)) for layer in layers
    )


def _fits(
    shape: "DecoderShape", weights: "Tensors", settings: ModelSettings, context_tokens: int | None
) -> tuple[Fit, ...]:
    """Estimate each budget's KV tokens. As on loading, memory is divided between weights, state slots and blocks."""
    from quire.backends.memory_plan import PoolBytes, num_slots_within

    weight_bytes, size = sum(_loaded_bytes(tensor, settings.dtype) for tensor in weights.values()), settings.block_size
    costs = PoolBytes(_kv_bytes(shape, settings.kv_dtype) * size, shape.state_bytes)
    max_blocks = settings.max_running * -(-(context_tokens or size) // size)
    fits = []
    for memory_gib in BUDGETS_GIB:
        free_bytes = memory_gib * GIB - OVERHEAD_BYTES - weight_bytes
        if costs.slot:
            free_bytes -= (num_slots_within(free_bytes, costs, settings.max_running, max_blocks, 2) + 1) * costs.slot
        fits.append(Fit(memory_gib, max(0, free_bytes // costs.block) * size))
    return tuple(fits)


def _loaded_bytes(tensor: "StoredTensor", dtype: str) -> int:
    return tensor.num_bytes if dtype == "auto" else tensor.num_values * VALUE_BYTES[dtype]


def _end_tokens(checkpoint: "Checkpoint") -> dict[int, str]:
    from quire.checkpoints import load_tokenizer

    if checkpoint.tokenizer_file is None:
        return dict.fromkeys(sorted(checkpoint.eos_token_ids), "")
    tokenizer = load_tokenizer(checkpoint.tokenizer_file)
    return {token: tokenizer.id_to_token(token) or "" for token in sorted(checkpoint.end_tokens(tokenizer.token_to_id))}


def _speed(read_bytes: int | None, bytes_per_s: float | None) -> Speed:
    return Speed(bytes_per_s, BANDWIDTH_SHARE * bytes_per_s / read_bytes if bytes_per_s and read_bytes else None)


def _print_tables(facts: Facts, speed: Speed) -> None:
    from quire.cli.shared.columns import columns, plain

    first, *rows = [(label, value) for label, value in _rows(facts, speed) if value is not None]
    typer.echo(columns(first, rows))
    if facts.fits is None:
        typer.echo(f"\nno estimate for the family {plain(facts.family)}: loading the model measures it", err=True)
        return
    weights = "weights as in the file" if facts.dtype == "auto" else f"{facts.dtype} weights"
    states = " and slots for states" if facts.state_bytes_per_sequence else ""
    assumptions = f"{weights}, {facts.kv_dtype} KV{states}, and 0.5 GiB for libraries and steps"
    typer.echo(f"\nwhat fits (an estimate for {assumptions}; loading measures it)\n")
    header = ("memory", "KV tokens", "sequences of full context")
    fits = [(f"{fit.memory_gib} GiB", *_fit_cells(fit, facts.context_tokens)) for fit in facts.fits]
    typer.echo(columns(header, fits, right=frozenset({0, 1, 2})))


def _rows(facts: Facts, speed: Speed) -> list[tuple[str, str | None]]:
    kv = facts.kv_bytes_per_token or {}
    return [
        ("model", facts.name),
        ("path", facts.path),
        ("family", facts.family),
        ("architecture", facts.architecture),
        ("parts", "; ".join(facts.parts) or None),
        ("runs", _run_words(facts)),
        ("layers", _number(facts.layers)),
        ("heads", _number(facts.heads)),
        ("KV heads", _number(facts.kv_heads)),
        ("head size", _number(facts.head_size)),
        ("context length", _number(facts.context_tokens, " tokens")),
        ("vocabulary", _number(facts.vocabulary, " tokens")),
        ("parameters", _number(facts.parameters)),
        ("weights", f"{facts.weight_bytes:,} bytes as {', '.join(facts.weight_types)}"),
        *((f"KV in {dtype}", f"{num_bytes:,} bytes per token") for dtype, num_bytes in kv.items()),
        ("state", f"{states:,} bytes per sequence" if (states := facts.state_bytes_per_sequence) else None),
        ("one request", _speed_words(facts, speed)),
        ("chat template", "yes" if facts.has_chat_template else "no"),
        ("end tokens", ", ".join(f"{token} {text}".strip() for token, text in facts.end_tokens.items()) or "none"),
    ]


def _run_words(facts: Facts) -> str:
    if facts.is_for_mlx:
        return "on the MLX backend (quire[mlx]), the only one that reads weights of mlx-lm"
    if facts.not_supported is None:
        return "on the CPU backend, with quire's own kernels"
    return f"through transformers, if at all (quire[torch]): {facts.not_supported}"


def _speed_words(facts: Facts, speed: Speed) -> str | None:
    if speed.tokens_per_s is None or speed.memory_bytes_per_s is None or facts.read_bytes_per_token is None:
        return None
    read, memory = facts.read_bytes_per_token / 1e9, speed.memory_bytes_per_s / 1e9
    return f"about {speed.tokens_per_s:.3g} tokens/s: a token reads {read:.2g} GB at {memory:.3g} GB/s memory bandwidth"


def _number(value: int | None, unit: str = "") -> str | None:
    return None if value is None else f"{value:,}{unit}"


def _fit_cells(fit: Fit, context_tokens: int | None) -> tuple[str, str]:
    if not fit.kv_tokens:
        return "does not fit", ""
    return f"{fit.kv_tokens:,}", f"{fit.kv_tokens // context_tokens:,}" if context_tokens else ""
