"""Builds the member card of an OpenAI member and checks its tokenizer. Pure logic, no I/O.

The server reports no model fingerprint: the operator must ensure that it runs the gateway's model. The gateway
compares tokenizers on a probe text, and never accepts a server whose tokens differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from quire.engine.calls import decode_message
from quire.engine.engine import ModelInfo
from quire.errors import MessageError
from quire.fleet.openai.address import OpenAIAddress
from quire.fleet.openai.metrics import DEFAULT_BLOCK_SIZE, OpenAIMetrics
from quire.fleet.protocol.messages import MemberCard, MemberReport
from quire.worker.messages import WorkerLoad

PROBE = "The quick brown fox: 12,345 naïve cafés 你好, мир 🙂\n\tdef f(x):  return x**2  # ΔΣ"
"""The probe text: words, numbers, white space and scripts that tokenizers split differently."""


@dataclass(frozen=True, slots=True)
class ModelClaim:
    """The gateway's model, which OpenAI members are assumed to run."""

    info: ModelInfo
    encode: Callable[[str], list[int]]
    """Encodes a text without adding special tokens."""


class ListedModel(msgspec.Struct):
    """An entry of `/v1/models`."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[ListedModel]


class _Tokens(msgspec.Struct):
    tokens: list[int]


_models_decoder = msgspec.json.Decoder(_Models)
_tokens_decoder = msgspec.json.Decoder(_Tokens)


def read_model(body: bytes, model_id: str) -> ListedModel:
    """Return the listed model with the id `model_id`, or the first if `model_id` is empty. Raises MessageError."""
    models = decode_message(_models_decoder.decode, "response of /v1/models", body).data
    model = next((model for model in models if model.id == model_id or not model_id), None)
    if model is None:
        names = ", ".join(model.id[:64] for model in models[:8]) or "nothing"
        message = f"expected the server to have model {model_id!r}, got {names}; change model=NAME in its line"
        raise MessageError(message, code="model_not_served")
    return model


def check_probe(body: bytes, expected: Sequence[int]) -> None:
    """Raise MessageError unless the server's tokens of the probe text equal the gateway's."""
    tokens = decode_message(_tokens_decoder.decode, "response of /tokenize", body).tokens
    if tokens != list(expected):
        difference = f"expected tokens {list(expected)[:8]} … of the gateway's tokenizer, got {tokens[:8]} …"
        message = f"{difference}; all members of one name must serve the same model"
        raise MessageError(message, code="another_tokenizer")


def card_of(
    address: OpenAIAddress, claim: ModelClaim, model: ListedModel, metrics: OpenAIMetrics, incarnation: str
) -> MemberCard:
    """Build the card of an OpenAI member; block size and count are estimates if the metrics lack them."""
    max_tokens = model.max_model_len or claim.info.max_sequence_tokens
    block_size = metrics.block_size or DEFAULT_BLOCK_SIZE
    num_blocks = metrics.num_blocks or max(1, max_tokens // block_size)
    size = f"{num_blocks} blocks of {block_size} tokens" if metrics.num_blocks else "of unknown size"
    info = ModelInfo(
        claim.info.identity,
        block_size,
        num_blocks,
        claim.info.vocabulary_size,
        max_tokens,
        f"{model.id[:64]}, not quire, {size}, up to {max_tokens} tokens a sequence",
    )
    has_size = metrics.num_blocks is not None
    return MemberCard(model.id, info, incarnation, address.events, address.replay, has_size)


def report_of(metrics: OpenAIMetrics, own_tokens: Sequence[int], num_received: int) -> MemberReport:
    """Build a load report from the server's metrics and `own_tokens`, the uncomputed tokens of each request of this
    gateway. Each waiting request of other clients is estimated to have the mean prompt length."""
    num_foreign = max(0, metrics.num_waiting - sum(1 for num_tokens in own_tokens if num_tokens))
    load = WorkerLoad(
        num_running=metrics.num_running,
        num_waiting=metrics.num_waiting,
        num_used_blocks=metrics.num_used_blocks,
        num_computed_tokens=metrics.num_computed_tokens,
        num_preemptions=metrics.num_preemptions,
    )
    return MemberReport(load, sum(own_tokens) + round(num_foreign * metrics.mean_prompt_tokens), num_received)
