"""The card of an OpenAI member, and what of it can be checked. Pure.

The server has no fingerprint: its operator vouches that it runs the gateway's model. What can be checked is whether
its tokenizer returns the same tokens; a server whose tokenizer does not is never accepted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from quire.engine.engine import ModelInfo
from quire.errors import MessageError
from quire.fleet.openai.address import OpenAIAddress
from quire.fleet.openai.metrics import DEFAULT_BLOCK_SIZE, OpenAIFigures
from quire.fleet.protocol.messages import MemberCard, MemberReport
from quire.worker.messages import WorkerLoad

PROBE = "The quick brown fox: 12,345 naïve cafés 你好, мир 🙂\n\tdef f(x):  return x**2  # ΔΣ"
"""Words, numbers, white space and alphabets that tokenizers split differently."""


@dataclass(frozen=True, slots=True)
class ModelClaim:
    """The gateway's model, which an OpenAI member is assumed to run."""

    info: ModelInfo
    encode: Callable[[str], list[int]]
    """A text's tokens, without special ones."""


@dataclass(frozen=True, slots=True)
class OpenAIModelCard:
    """A model as a server lists it."""

    name: str
    max_sequence_tokens: int | None


class _Listed(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Listed]


class _Tokens(msgspec.Struct):
    tokens: list[int]


_models = msgspec.json.Decoder(_Models)
_tokens = msgspec.json.Decoder(_Tokens)


def read_model(body: bytes, wanted: str) -> OpenAIModelCard:
    """The model of this name, or the first if none is required. Raises MessageError."""
    try:
        listed = _models.decode(body).data
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MessageError(f"malformed response of /v1/models: {error}") from error
    found = next((one for one in listed if one.id == wanted or not wanted), None)
    if found is None:
        names = ", ".join(one.id[:64] for one in listed[:8]) or "nothing"
        sentence = f"expected the server to have model {wanted!r}, got {names}; change model=NAME in its line"
        raise MessageError(sentence, code="model_not_served")
    return OpenAIModelCard(found.id, found.max_model_len)


def check_probe(body: bytes, expected: Sequence[int]) -> None:
    """Raise MessageError unless the server's tokenizer splits the probe as this gateway's does."""
    try:
        tokens = _tokens.decode(body).tokens
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MessageError(f"malformed response of /tokenize: {error}") from error
    if tokens != list(expected):
        rule = f"expected the gateway's tokenizer, with tokens {list(expected)[:8]} … for the probe, got {tokens[:8]} …"
        sentence = f"{rule}; all members of one name must serve the same model"
        raise MessageError(sentence, code="another_tokenizer")


def card_of(
    address: OpenAIAddress, claim: ModelClaim, model: OpenAIModelCard, figures: OpenAIFigures, incarnation: str
) -> MemberCard:
    """A card such as a quire member sends."""
    longest = model.max_sequence_tokens or claim.info.max_sequence_tokens
    block_size = figures.block_size or DEFAULT_BLOCK_SIZE
    num_blocks = figures.num_blocks or max(1, longest // block_size)
    size = f"{num_blocks} blocks of {block_size} tokens" if figures.num_blocks else "of a size that it does not tell"
    info = ModelInfo(
        claim.info.identity,
        block_size,
        num_blocks,
        claim.info.vocabulary_size,
        longest,
        f"{model.name[:64]}, not quire, {size}, up to {longest} tokens a sequence",
    )
    has_size = figures.num_blocks is not None
    return MemberCard(model.name, info, incarnation, address.events, address.replay, has_size)


def report_of(figures: OpenAIFigures, own_tokens: Sequence[int], num_received: int) -> MemberReport:
    """Its load, by its own metrics and by this gateway's assignments: tokens that each request still has to have
    computed. Requests of others that wait there are estimated by its mean prompt."""
    num_others = max(0, figures.num_waiting - sum(1 for num in own_tokens if num))
    load = WorkerLoad(
        num_running=figures.num_running,
        num_waiting=figures.num_waiting,
        num_used_blocks=figures.num_used_blocks,
        num_computed_tokens=figures.num_computed_tokens,
        num_preemptions=figures.num_preemptions,
    )
    return MemberReport(load, sum(own_tokens) + round(num_others * figures.mean_prompt_tokens), num_received)
