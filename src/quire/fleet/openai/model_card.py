"""Builds the member card of an OpenAI member and checks its tokenizer. Pure logic, no I/O.

The server reports no model fingerprint: the operator is responsible that it runs the gateway's model. The gateway
compares tokenizers on a probe text, and never accepts a server whose tokens differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from quire.engine.calls import decoded
from quire.engine.engine import ModelInfo
from quire.errors import MessageError
from quire.fleet.openai.address import OpenAIAddress
from quire.fleet.openai.metrics import DEFAULT_BLOCK_SIZE, OpenAIFigures
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


_models = msgspec.json.Decoder(_Models)
_tokens = msgspec.json.Decoder(_Tokens)


def read_model(body: bytes, wanted: str) -> ListedModel:
    """Return the listed model with the id `wanted`, or the first if `wanted` is empty. Raises MessageError."""
    listed = decoded(_models.decode, "response of /v1/models", body).data
    found = next((one for one in listed if one.id == wanted or not wanted), None)
    if found is None:
        names = ", ".join(one.id[:64] for one in listed[:8]) or "nothing"
        sentence = f"expected the server to have model {wanted!r}, got {names}; change model=NAME in its line"
        raise MessageError(sentence, code="model_not_served")
    return found


def check_probe(body: bytes, expected: Sequence[int]) -> None:
    """Raise MessageError unless the server's tokens of the probe text equal the gateway's."""
    tokens = decoded(_tokens.decode, "response of /tokenize", body).tokens
    if tokens != list(expected):
        rule = f"expected the gateway's tokenizer, with tokens {list(expected)[:8]} … for the probe, got {tokens[:8]} …"
        sentence = f"{rule}; all members of one name must serve the same model"
        raise MessageError(sentence, code="another_tokenizer")


def card_of(
    address: OpenAIAddress, claim: ModelClaim, model: ListedModel, figures: OpenAIFigures, incarnation: str
) -> MemberCard:
    """Build the card of an OpenAI member; block size and count are estimates if the metrics lack them."""
    longest = model.max_model_len or claim.info.max_sequence_tokens
    block_size = figures.block_size or DEFAULT_BLOCK_SIZE
    num_blocks = figures.num_blocks or max(1, longest // block_size)
    size = f"{num_blocks} blocks of {block_size} tokens" if figures.num_blocks else "of unknown size"
    info = ModelInfo(
        claim.info.identity,
        block_size,
        num_blocks,
        claim.info.vocabulary_size,
        longest,
        f"{model.id[:64]}, not quire, {size}, up to {longest} tokens a sequence",
    )
    has_size = figures.num_blocks is not None
    return MemberCard(model.id, info, incarnation, address.events, address.replay, has_size)


def report_of(figures: OpenAIFigures, own_tokens: Sequence[int], num_received: int) -> MemberReport:
    """Build a load report from the server's metrics and `own_tokens`, the uncomputed tokens of each own request. Other
    clients' waiting requests are estimated by the mean prompt length."""
    num_others = max(0, figures.num_waiting - sum(1 for num in own_tokens if num))
    load = WorkerLoad(
        num_running=figures.num_running,
        num_waiting=figures.num_waiting,
        num_used_blocks=figures.num_used_blocks,
        num_computed_tokens=figures.num_computed_tokens,
        num_preemptions=figures.num_preemptions,
    )
    return MemberReport(load, sum(own_tokens) + round(num_others * figures.mean_prompt_tokens), num_received)
