"""Validation of messages from other machines, which must not crash a worker or a router.

A request that is created in this process is validated then. A member also validates requests from other machines, so
that tokens outside the vocabulary or NaN values are refused and never reach a worker.
"""

from collections.abc import Iterable, Sequence
from math import isfinite

from msgspec.structs import asdict

from quire.client.request.params import MAX_ANSWERS, SamplingParams
from quire.core.request import ResolvedSampling
from quire.engine.commands import Restore, Submit
from quire.engine.engine import ModelInfo
from quire.errors import MessageError, RequestError
from quire.fleet.protocol.messages import MemberCard

MAX_ID_CHARS = 256
"""Maximum length of a gateway's request id."""
MAX_SECONDS = 1e9
"""Maximum absolute value of an age or remaining time: thirty years."""


def check_assignment(command: Submit | Restore, info: ModelInfo) -> None:
    """Raise RequestError if the request is invalid for this model."""
    for name, value in (("age_s", command.age_s), ("time_left_s", command.time_left_s)):
        if value is not None and not (isfinite(value) and abs(value) <= MAX_SECONDS):
            raise RequestError(f"expected {name} to be a number of seconds up to {MAX_SECONDS:g}, got {value}")
    check_tokens("a prompt", command.prompt, info.vocabulary_size)
    continuations = command.continuations
    indexes = [continuation.index for continuation in continuations]
    if len(set(indexes)) != len(indexes) or not set(indexes) <= set(range(MAX_ANSWERS)):
        raise RequestError(f"expected distinct answer indexes from 0 to {MAX_ANSWERS - 1}, got {indexes[:16]}")
    for continuation in continuations:
        check_tokens("an answer", continuation.produced, info.vocabulary_size)
        if len(command.prompt) + len(continuation.produced) > info.max_sequence_tokens:
            num_tokens = len(command.prompt) + len(continuation.produced)
            message = f"expected a sequence of up to {info.max_sequence_tokens} tokens, got {num_tokens}"
            raise RequestError(f"{message}; send it to a member with a longer limit")
    _check_sampling(command.params, info.vocabulary_size)


def check_tokens(label: str, tokens: Sequence[int], vocabulary_size: int) -> None:
    """Raise RequestError for tokens outside the vocabulary."""
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary_size):
        invalid_id = next(token_id for token_id in tokens if not 0 <= token_id < vocabulary_size)
        raise RequestError(f"{label}: expected token ids from 0 to {vocabulary_size - 1}, got {invalid_id}")


def check_card(card: MemberCard) -> None:
    """Raise MessageError if the card has counts out of range, or no incarnation or model."""
    info = card.info
    counts = (info.block_size, info.num_blocks, info.vocabulary_size, info.max_sequence_tokens)
    if not _are_counts(counts):
        raise MessageError(f"expected positive counts of blocks and tokens in a member card, got {counts}")
    if not card.incarnation or not info.identity.fingerprint:
        raise MessageError("invalid member card: expected an incarnation and a model")


def _are_counts(numbers: Iterable[int]) -> bool:
    return all(1 <= number <= 1 << 40 for number in numbers)


def _check_sampling(params: ResolvedSampling, vocabulary_size: int) -> None:
    """Check sampling parameters by the same rules as those of clients. Raises RequestError."""
    # If the client set no limit, max_tokens is the remaining context, which may be less than min_tokens.
    max_tokens = max(params.max_tokens, params.min_tokens)
    lists = {"logit_bias": dict(params.logit_bias), "stop_token_ids": tuple(params.stop_token_ids)}
    SamplingParams(**{**asdict(params), **lists, "max_tokens": max_tokens}).resolve({}, frozenset(), vocabulary_size)
    if params.max_tokens < 0:
        raise RequestError(f"expected max_tokens of at least 0, got {params.max_tokens}")
