"""Runs any full-attention decoder of transformers through its own modules with quire's attention.

The model runs over one flat row with the tokens of all sequences, [1, rows], and explicit positions. When a layer calls
attention, this module receives its queries, keys and values: keys and values are written to the KV store, and queries
attend to the store through block tables. All other computation stays in the model's modules.

Loading checks that this works for the model: a short text must give the same logits with its own attention and with
quire's. A model with an unknown attention bias is rejected there, with the reason.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.backends.host.batch import Batch, make_batch
from quire.backends.host.block_store import LayerShape
from quire.backends.host.wanted import PassOutputs
from quire.backends.torch.attention import AttentionSettings, attend
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.linear import LinearKind, PackedLinear, padded
from quire.backends.torch.tiles import Tiler, TilesByWindow
from quire.backends.torch.whole_vectors import WholeVectors
from quire.checkpoints.families.layer_rules import windows_of
from quire.core.step import WorkItem
from quire.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION_NAME = "quire"
CPU = torch.device("cpu")
PROBE_TOKENS = 24
PROBE_TOLERANCE = 1e-3
PROBE_ROUNDINGS = 16
"""Tolerance for the logits, in rounding errors (epsilon) of the model's dtype."""


class Adapter:
    """A transformers model over flat batches and block tables. Only device cpu is tested."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        directory: Path,
        dtype: torch.dtype,
        linear: LinearKind,
        device: torch.device = CPU,
    ) -> None:
        config = _read_config(fields)
        _check_config(config)
        text = config.get_text_config()
        self._windows = windows_of(text.to_dict(), int(text.num_hidden_layers))
        self.vocabulary_size = int(text.vocab_size)
        self._layer_attention: Callable[..., torch.Tensor] = self._probe_attention
        self._linear = linear
        self._tilers: dict[int, Tiler] = {}
        self._tiles: TilesByWindow = {}
        self._device = device
        self._kv_indices: tuple[torch.Tensor, torch.Tensor] | None = None
        self._store: KVStore | None = None
        self._hidden_states: torch.Tensor | None = None
        self._shapes: dict[int, tuple[LayerShape, int]] = {}
        self._model = _load(config, directory, dtype).to(device)
        self._model.base_model.register_forward_hook(self._record_hidden)
        for module in self._model.modules():
            if hasattr(module, "layer_idx"):
                module.quire_adapter = self
        if linear.is_packed:
            _pack_linear_layers(self._model, linear)
        self._check_logits()

    @property
    def kv_shapes(self) -> tuple[LayerShape, ...]:
        return tuple(self._shapes[layer][0] for layer in range(len(self._windows)))

    def compute(self, batch: Batch, store: KVStore, requested: NDArray[np.int64]) -> PassOutputs:
        """Write the rows' KV; return the last hidden states and the logits of the requested rows."""
        tiles = self._tiler(store.block_size).tiles(batch)
        self._kv_indices = (self._tensor(batch.blocks), self._tensor(batch.slots))
        self._store, self._tiles, self._layer_attention = store, tiles, self._store_attention
        logits = self._run(*(self._tensor(array) for array in (batch.tokens, batch.positions, requested)))
        hidden = self._hidden_states
        self._kv_indices = self._store = self._hidden_states = None
        if hidden is None:
            raise CheckpointError("the model returned no hidden state; quire cannot check whether its rows are finite")
        states = hidden[0].float().cpu().numpy()
        return PassOutputs(np.isfinite(states).all(axis=1), states, logits.cpu().numpy())

    def _tensor(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Compute a layer's attention; queries, keys and values are [row, head, size]."""
        return self._layer_attention(layer, queries, keys, values, options)

    def _store_attention(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        kv_indices, store = self._kv_indices, self._store
        if kv_indices is None or store is None:
            raise CheckpointError("attention was called outside a step; choose another model")
        store.write(layer, *kv_indices, keys, values)
        settings = AttentionSettings(options["scaling"], options.get("softcap"))
        return attend(queries.contiguous(), store, layer, self._tiles[self._windows[layer]], settings)

    def _probe_attention(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Record the layer's KV shape and return zeros. Raises CheckpointError for unsupported attention."""
        if layer in self._shapes:
            raise CheckpointError(f"layer {layer} attends twice in one pass; choose another model")
        if options.get("s_aux") is not None:
            raise CheckpointError("attention with sinks is not supported; choose another model")
        if options.get("scaling") is None:
            raise CheckpointError("the model does not specify how it scales attention; choose another model")
        if "sliding_window" in options and options["sliding_window"] != self._windows[layer]:
            raise CheckpointError(
                f"layer {layer}: expected a window of {self._windows[layer]} as in config.json, got "
                f"{options['sliding_window']}; choose another model"
            )
        shape = LayerShape(keys.shape[1], keys.shape[2], values.shape[2])
        self._shapes[layer] = (shape, queries.shape[1] // keys.shape[1])
        return queries.new_zeros(*queries.shape[:2], values.shape[2])

    def _tiler(self, block_size: int) -> Tiler:
        if block_size not in self._tilers:
            group = min(size for _, size in self._shapes.values())
            self._tilers[block_size] = Tiler(block_size, self.kv_shapes, self._windows, group, self._device)
        return self._tilers[block_size]

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, requested: torch.Tensor) -> torch.Tensor:
        rows = requested if len(requested) else torch.zeros(1, dtype=torch.int64, device=self._device)
        with WholeVectors():
            out = self._model(
                input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, logits_to_keep=rows
            )
        logits: torch.Tensor = out.logits[0, : len(requested)].float()
        return logits

    def _record_hidden(self, _module: object, _inputs: object, output: Any) -> None:
        self._hidden_states = output[0]

    def _check_logits(self) -> None:
        tokens = torch.arange(PROBE_TOKENS, device=self._device) * 7 % self.vocabulary_size
        rows = torch.arange(PROBE_TOKENS, device=self._device)
        self._model.set_attn_implementation("eager")
        expected = self._run(tokens, rows, rows)
        self._model.set_attn_implementation(ATTENTION_NAME)
        self._run(tokens, rows, rows)
        if set(self._shapes) != set(range(len(self._windows))):
            raise CheckpointError(
                f"expected all {len(self._windows)} layers to attend through the shared interface, got "
                f"{len(self._shapes)}; models that share KV between layers or keep recurrent state are not supported"
            )
        size = 8
        item = WorkItem(0, tuple(tokens.tolist()), 0, (1, 2, 3))
        store = KVStore(self.kv_shapes, 3, size, expected.dtype, self._device)
        logits = self.compute(make_batch([item], size, padded), store, rows.cpu().numpy()).logits
        max_error = float((torch.from_numpy(logits) - expected.cpu()).abs().max())
        tolerance = max(PROBE_TOLERANCE, PROBE_ROUNDINGS * torch.finfo(self._model.dtype).eps)
        if not max_error <= tolerance * max(1.0, float(expected.abs().max())):
            raise CheckpointError(
                "expected equal logits from the model's own attention and paged attention, got a "
                f"difference of {max_error:.2g}: quire does not support its attention; choose another model"
            )


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function called by transformers: [1, head, row, size] in, [1, row, head, size] out."""
    del attention_mask
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    adapter: Adapter = module.quire_adapter  # type: ignore[assignment]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return adapter.attend(layer, queries, keys, values, options).unsqueeze(0), None


def _pack_linear_layers(model: "PreTrainedModel", linear: LinearKind) -> None:
    """Pack the weights of the model's linear layers; free the originals, except a head that is also the embedding."""
    shared = model.get_input_embeddings().weight
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            bias: torch.Tensor | None = getattr(module, "bias", None)
            product = linear.prepare(module.weight.detach(), bias if bias is None else bias.detach())
            module.forward = _any_shape(product, linear)  # type: ignore[method-assign, assignment]
            if module.weight is not shared:
                module.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


def _any_shape(product: PackedLinear, linear: LinearKind) -> PackedLinear:
    """Return a function that flattens its input to rows, pads them to a supported row count and calls the product."""

    def forward(values: torch.Tensor) -> torch.Tensor:
        rows = values.flatten(0, -2).contiguous()
        num_rows, num_padded = len(rows), linear.padded(len(rows))
        padded = rows if num_padded == num_rows else torch.nn.functional.pad(rows, (0, 0, 0, num_padded - num_rows))
        products = product(padded)[:num_rows]
        return products.view(*values.shape[:-1], products.shape[-1])

    return forward


def _no_mask(*_: object, **__: object) -> None:
    """Return no mask; block tables and positions define to which tokens a row attends."""


def _read_config(fields: Mapping[str, Any]) -> "PretrainedConfig":
    """Return config.json as a transformers config with defaults. Code named by a checkpoint is never executed."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415

    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"expected config.json to name a model_type that transformers supports, got {model_type!r}; models that "
            "bring their own code are not supported"
        )
    try:
        return CONFIG_MAPPING[model_type].from_dict({k: v for k, v in fields.items() if k != "auto_map"})
    except Exception as error:
        raise CheckpointError(
            f"config.json is not a valid {model_type} config: {_one_line(error)}; download it again"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _check_config(config: "PretrainedConfig") -> None:
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    rope_types = {fields.get("rope_type") for fields in (rope, *rope.values()) if isinstance(fields, dict)}
    if config.is_encoder_decoder:
        raise CheckpointError(f"expected a decoder, got the encoder-decoder {config.model_type}; choose another model")
    if rope_types & {"dynamic", "longrope"}:
        raise CheckpointError(
            "RoPE scaling that depends on the length of a sequence cannot share a prefix cache; config.json has "
            f"{', '.join(sorted(str(rope_type) for rope_type in rope_types if rope_type))}; choose another model"
        )


def _check_tensors(report: Mapping[str, Any], model_type: str) -> None:
    """Raise CheckpointError on missing or unused tensors: transformers initializes or ignores them silently."""
    for key, problem in (("missing_keys", "missing"), ("unexpected_keys", "unused")):
        if names := sorted(map(str, report.get(key) or ())):
            raise CheckpointError(
                f"{len(names)} {problem} tensors in the checkpoint of a {model_type} model, the first is {names[0]!r}; "
                "config.json and weights belong to different models"
            )


def _load(config: "PretrainedConfig", directory: Path, dtype: torch.dtype) -> "PreTrainedModel":
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    AttentionInterface.register(ATTENTION_NAME, _paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False,
            output_loading_info=True,
        )  # fmt: skip
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot load this {config.model_type} model: {_one_line(error)}; download it again"
        ) from error
    _check_tensors(report, config.model_type)
    if not model._supports_attention_backend:
        raise CheckpointError(f"quire cannot replace the attention of {config.model_type}; choose another model")
    loaded: PreTrainedModel = model.eval()
    return loaded
