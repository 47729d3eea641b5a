"""Checks of messages from other machines, which must not crash a worker or a router.

In one process a request was checked when it was made. One from another machine is checked again where it arrives: a
token outside the vocabulary, or a number that is none, ends in a refusal and not in a worker.
"""

from collections.abc import Iterable, Sequence
from math import isfinite

from quire.client.request.params import MAX_ANSWERS, SamplingParams
from quire.core.request import ResolvedSampling
from quire.engine.commands import Restore, Submit
from quire.engine.engine import ModelInfo
from quire.errors import MessageError, RequestError
from quire.fleet.protocol.messages import MemberCard

MAX_ID_CHARS = 256
"""Of a gateway's request id."""
MAX_SECONDS = 1e9
"""Of an age or a time left: thirty years."""


def check_assignment(command: Submit | Restore, info: ModelInfo) -> None:
    """Raise RequestError for a request that no correct gateway sends for this model."""
    for name, value in (("age_s", command.age_s), ("time_left_s", command.time_left_s)):
        if value is not None and not (isfinite(value) and abs(value) <= MAX_SECONDS):
            raise RequestError(f"expected {name} to be a number of seconds up to {MAX_SECONDS:g}, got {value}")
    check_tokens("a prompt", command.prompt, info.vocabulary_size)
    answers = command.continuations
    indexes = [one.index for one in answers]
    if len(set(indexes)) != len(indexes) or not set(indexes) <= set(range(MAX_ANSWERS)):
        raise RequestError(f"expected distinct answer indexes from 0 to {MAX_ANSWERS - 1}, got {indexes[:16]}")
    for one in answers:
        check_tokens("an answer", one.produced, info.vocabulary_size)
        if len(command.prompt) + len(one.produced) > info.max_sequence_tokens:
            num_tokens = len(command.prompt) + len(one.produced)
            rule = f"expected a sequence of up to {info.max_sequence_tokens} tokens, got {num_tokens}"
            raise RequestError(f"{rule}; send it to a member with a longer limit")
    _check_sampling(command.params, info.vocabulary_size)


def check_tokens(what: str, tokens: Sequence[int], vocabulary_size: int) -> None:
    """Raise RequestError for tokens outside the vocabulary."""
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary_size):
        strange = next(one for one in tokens if not 0 <= one < vocabulary_size)
        raise RequestError(f"{what}: expected token ids from 0 to {vocabulary_size - 1}, got {strange}")


def check_card(card: MemberCard) -> None:
    """Raise MessageError for a member whose figures are out of range."""
    info = card.info
    counts = (info.block_size, info.num_blocks, info.vocabulary_size, info.max_sequence_tokens)
    if not _are_counts(counts):
        raise MessageError(f"expected positive counts of blocks and tokens in a member card, got {counts}")
    if not card.incarnation or not info.identity.fingerprint:
        raise MessageError("invalid member card: expected an incarnation and a model")


def _are_counts(numbers: Iterable[int]) -> bool:
    return all(1 <= one <= 1 << 40 for one in numbers)


def _check_sampling(params: ResolvedSampling, vocabulary_size: int) -> None:
    """By the rules for clients' parameters."""
    SamplingParams(
        # Where a client set no limit the room is one, and it may have requested more tokens than fit.
        max_tokens=max(params.max_tokens, params.min_tokens),
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=params.allowed_token_ids,
        banned_token_ids=params.banned_token_ids,
        stop_token_ids=tuple(params.stop_token_ids),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    ).settle({}, frozenset(), vocabulary_size)
    if params.max_tokens < 0:
        raise RequestError(f"expected max_tokens of at least 0, got {params.max_tokens}")
