"""Log-probabilities in the OpenAI API's two formats (chat, completions), and in vLLM's format for prompts."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quire.api.http.limits import MIN_LOGPROB
from quire.client.request.text_model import Tokenizer
from quire.core.step import TokenLogprobs

_ENCODER = msgspec.json.Encoder()


class TokenNames(msgspec.Struct, frozen=True):
    """Converts token ids to the names that tokens have in log-probabilities: their text, or `token_id:N`."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def name(self, token_id: int) -> str:
        """Return the token's text with invalid UTF-8 replaced, or `token_id:N` with `as_ids`."""
        return f"token_id:{token_id}" if self.as_ids else self.text(token_id)

    def text(self, token_id: int) -> str:
        """Return the token's text, also with `as_ids`."""
        return self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """Return the token's entry in a chat's list."""
        data = self.tokenizer.token_bytes(token_id)
        return {"token": self.name(token_id), "logprob": finite(logprob), "bytes": list(data)}


def finite(logprob: float) -> float:
    """Replace minus infinity, which JSON does not have, by a finite minimum."""
    return max(logprob, MIN_LOGPROB)


def chat_logprobs(entries: Iterable[TokenLogprobs], names: TokenNames) -> dict[str, Any]:
    """Return `{"content": [{token, logprob, bytes, top_logprobs}]}`."""
    return {
        "content": [
            {
                **names.entry(entry.token_id, entry.logprob),
                "top_logprobs": [names.entry(token, logprob) for token, logprob in entry.alternatives],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    entries: Sequence[TokenLogprobs | int], names: TokenNames, offset: int = 0
) -> tuple[dict[str, list[Any]], int]:
    """Return parallel arrays, and the text offset of the next token. A bare id is a token without log-probability."""
    tokens, values, tops, offsets = [], [], [], []
    for entry in entries:
        is_bare = isinstance(entry, int)
        token_id = entry if isinstance(entry, int) else entry.token_id
        tokens.append(names.name(token_id))
        offsets.append(offset)
        offset += len(names.text(token_id))
        values.append(None if is_bare else finite(entry.logprob))  # type: ignore[union-attr]
        tops.append(None if is_bare else _by_name(entry, names))  # type: ignore[arg-type]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset


def _by_name(entry: TokenLogprobs, names: TokenNames) -> dict[str, float]:
    alternatives = {names.name(token): finite(logprob) for token, logprob in entry.alternatives}
    return {**alternatives, names.name(entry.token_id): finite(entry.logprob)}


def prompt_logprobs(entries: Iterable[TokenLogprobs], names: TokenNames) -> msgspec.Raw:
    """Encode a prompt's log-probabilities by token id with rank; null for the first token. Encoded once per prompt."""
    return msgspec.Raw(b"[" + b",".join([b"null", *(_ENCODER.encode(_by_id(item, names)) for item in entries)]) + b"]")


def _by_id(entry: TokenLogprobs, names: TokenNames) -> dict[str, Any]:
    entries = {
        str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": names.name(token)}
        for rank, (token, logprob) in enumerate(entry.alternatives, start=1)
    }
    entries[str(entry.token_id)] = {
        "logprob": finite(entry.logprob),
        "rank": entry.rank,
        "decoded_token": names.name(entry.token_id),
    }
    return entries
