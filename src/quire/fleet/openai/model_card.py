"""What a member that is not quire says of itself, and what of that can be checked. Pure.

It has no fingerprint: whoever lists it says that it computes the gateway's model. What can be asked is whether it cuts
a text into the same tokens; one that does not is never let in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from quire.engine.engine import ModelInfo
from quire.errors import MessageError
from quire.fleet.openai.address import StrangerAddress
from quire.fleet.openai.metrics import DEFAULT_BLOCK_SIZE, StrangerFigures
from quire.fleet.protocol.messages import MemberCard, MemberReport
from quire.worker.messages import WorkerLoad

PROBE = "The quick brown fox: 12,345 naïve cafés 你好, мир 🙂\n\tdef f(x):  return x**2  # ΔΣ"
"""Words, numbers, white space and alphabets that tokenizers cut differently."""


@dataclass(frozen=True, slots=True)
class ModelClaim:
    """What the gateway's model is, which a stranger is believed to compute."""

    info: ModelInfo
    encode: Callable[[str], list[int]]
    """A text's tokens, without special ones."""


@dataclass(frozen=True, slots=True)
class StrangerModel:
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


def read_model(body: bytes, wanted: str) -> StrangerModel:
    """The model of this name, or the first if any will do. Raises MessageError."""
    try:
        listed = _models.decode(body).data
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MessageError(f"/v1/models does not list models as the OpenAI API does: {error}") from error
    found = next((one for one in listed if one.id == wanted or not wanted), None)
    if found is None:
        names = ", ".join(one.id[:64] for one in listed[:8]) or "nothing"
        raise MessageError(f"the server has {names}, {wanted!r} was asked for; change model=NAME in its line")
    return StrangerModel(found.id, found.max_model_len)


def check_probe(body: bytes, expected: Sequence[int]) -> None:
    """Raise MessageError unless the server cuts the probe into the tokens that this gateway does."""
    try:
        tokens = _tokens.decode(body).tokens
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MessageError(f"/tokenize does not answer with tokens: {error}") from error
    if tokens != list(expected):
        raise MessageError(
            f"the server has another tokenizer than this gateway: a text that has the tokens {list(expected)[:8]} … "
            f"here has {tokens[:8]} … there; all members of one name must compute the same model"
        )


def card_of(
    address: StrangerAddress, claim: ModelClaim, model: StrangerModel, figures: StrangerFigures, incarnation: str
) -> MemberCard:
    """What a member of quire's own would have said."""
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


def report_of(figures: StrangerFigures, own_tokens: Sequence[int], num_heard: int) -> MemberReport:
    """How busy it is by its own word, and by what it was given from here: tokens that each request still has to have
    computed. What others have waiting there is taken to be like what it had before."""
    num_others = max(0, figures.num_waiting - sum(1 for num in own_tokens if num))
    load = WorkerLoad(
        num_running=figures.num_running,
        num_waiting=figures.num_waiting,
        num_used_blocks=figures.num_used_blocks,
        num_computed_tokens=figures.num_computed_tokens,
        num_preemptions=figures.num_preemptions,
    )
    return MemberReport(load, sum(own_tokens) + round(num_others * figures.mean_prompt_tokens), num_heard)
