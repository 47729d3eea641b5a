"""Sampling parameters as a client sets them; `resolve` converts them to the core's `ResolvedSampling`.

`SamplingParams` has the fields of `ResolvedSampling`, and fields that only the parent process uses: stop strings, the
seed and the number of answers. Every value is validated here; in `ResolvedSampling` every default is filled in.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from math import isfinite
from types import MappingProxyType
from typing import Any

from quire.core.request import ResolvedSampling
from quire.errors import InvalidParameterError
from quire.text.grammars.grammar import Grammar as Grammar  # noqa: PLC0414 - re-exported for the API
from quire.text.parsers.reader import AnswerFormat

MAX_ANSWERS = 8
MAX_LOGPROBS = 20
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_BIASES = 1024
MAX_LIST_LENGTH = 1 << 18
"""Maximum length of a list of token ids; larger than any vocabulary."""
MAX_SHOWN_CHARS = 200
"""Maximum characters of a caller's value quoted in an error message."""


def _field(default: Any, doc: str, low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"doc": doc, "low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. None means the model's default, or no effect if the model has no default."""

    max_tokens: int | None = _field(
        None,
        "Maximum output tokens. None: up to the maximum sequence length. 0 requires `prompt_logprobs`.",
        0,
        1 << 30,
    )
    temperature: float | None = _field(None, "0 takes the likeliest token; 1 is the model's distribution.", 0.0, 100.0)
    top_k: int | None = _field(None, "Keep the k likeliest tokens; 0 keeps all.", 0, 1 << 31)
    top_p: float | None = _field(None, "Keep the likeliest tokens up to this total probability.", 0.0, 1.0)
    min_p: float | None = _field(None, "Drop tokens below this share of the likeliest token's probability.", 0.0, 1.0)
    repetition_penalty: float | None = _field(None, "Above 1 makes prompt and output tokens less likely.", 0.01, 100.0)
    presence_penalty: float = _field(0.0, "Subtracted from the logit of every token in the output.", -100.0, 100.0)
    frequency_penalty: float = _field(0.0, "Subtracted from the logit per occurrence in the output.", -100.0, 100.0)
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, metadata={"doc": f"Map of token ids to values added to their logits; up to {MAX_BIASES}."}
    )
    allowed_token_ids: Sequence[int] | None = _field(None, "Only these tokens may be chosen.")
    banned_token_ids: Sequence[int] = _field((), "These tokens are never chosen.")
    min_tokens: int = _field(0, "Stop tokens cannot be chosen before this many output tokens.", 0, 1 << 30)
    stop: Sequence[str] = _field((), f"Up to {MAX_STOPS} stop strings, which end the answer and are not part of it.")
    stop_token_ids: Sequence[int] = _field((), "Tokens that end the answer, in addition to the model's end tokens.")
    stop_loops: bool = _field(
        False,
        "End an answer that repeats itself: its last tokens, at least 256 and 8 times the period, have a period of 1 "
        "to 128 tokens.",
    )
    ignore_eos: bool = _field(False, "Continue after the model's end tokens.")
    seed: int | None = _field(
        None, "Equal seeds give equal tokens. None: a random seed, which is reported.", -(1 << 63), (1 << 64) - 1
    )
    n: int = _field(1, "Number of answers to one prompt, which is computed only once.", 1, MAX_ANSWERS)
    logprobs: int | None = _field(None, "Report log-probabilities, this many alternatives per token.", 0, MAX_LOGPROBS)
    prompt_logprobs: int | None = _field(None, "Like `logprobs`, for the tokens of the prompt.", 0, MAX_LOGPROBS)
    include_stop: bool = _field(False, "Include the stop string in the answer.")
    skip_special_tokens: bool = _field(True, "Leave special tokens out of the text.")
    grammar: Grammar | None = field(
        default=None, metadata={"doc": "Grammar that the answer must match, such as `Grammar.json_schema(...)`."}
    )
    answer_format: AnswerFormat | None = field(
        default=None, metadata={"doc": "Format of reasoning and tool calls in the answer; set by the chat APIs."}
    )

    def __post_init__(self) -> None:
        self._convert_iterables()
        for field_info in fields(self):
            _check_range(field_info.name, getattr(self, field_info.name), field_info.metadata)
        for name in ("stop_loops", "ignore_eos", "include_stop", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                quoted_value = _short(getattr(self, name))
                raise InvalidParameterError(f"expected {name} to be true or false, got {quoted_value}", name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameterError(
                "expected at least one token in allowed_token_ids, or None to allow all", "allowed_token_ids"
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidParameterError(
                "expected max_tokens of at least 1, or 0 with prompt_logprobs; got 0 and no prompt_logprobs",
                "max_tokens",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                f"expected min_tokens of at most max_tokens, got {self.min_tokens} and {self.max_tokens}", "min_tokens"
            )
        self._check_grammar()
        if len(self.stop) > MAX_STOPS or not all(_is_stop(text) for text in self.stop):
            message = f"expected at most {MAX_STOPS} stop strings of 1 to {MAX_STOP_CHARS} characters"
            raise InvalidParameterError(f"{message}, got {_short(self.stop)}", "stop")
        if len(self.logit_bias) > MAX_BIASES or not all(
            isfinite(bias) and abs(bias) <= 1000 for bias in self.logit_bias.values()
        ):
            message = f"expected at most {MAX_BIASES} numbers between -1000 and 1000 in logit_bias"
            raise InvalidParameterError(message, "logit_bias")

    def _check_grammar(self) -> None:
        if self.answer_format is not None and not isinstance(self.answer_format, AnswerFormat):
            message = f"expected an AnswerFormat as answer_format, got {_short(self.answer_format)}"
            raise InvalidParameterError(message, "answer_format")
        if self.grammar is None:
            return
        if not isinstance(self.grammar, Grammar):
            raise InvalidParameterError(f"expected a quire.Grammar as grammar, got {_short(self.grammar)}", "grammar")
        for name, neutral in (("ignore_eos", False), ("min_tokens", 0)):
            if getattr(self, name) != neutral:
                raise InvalidParameterError(f"expected no {name} with a grammar, which ends the answer; omit it", name)

    def _convert_iterables(self) -> None:
        """Convert iterables to tuples and None to an empty tuple, so that values cannot change or be consumed later."""
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _to_tuple("stop", self.stop))
        for name in ("banned_token_ids", "stop_token_ids"):
            object.__setattr__(self, name, _to_tuple(name, getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _to_tuple("allowed_token_ids", self.allowed_token_ids))
        raw_bias: Any = self.logit_bias
        bias = {} if raw_bias is None else raw_bias
        if not isinstance(bias, Mapping) or not all(isinstance(value, int | float) for value in bias.values()):
            raise InvalidParameterError(
                f"expected logit_bias to map token ids to numbers, got {_short(bias)}", "logit_bias"
            )
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(bias)))

    def resolve(
        self, defaults: Mapping[str, float | int], eos: frozenset[int], vocabulary_size: int, max_tokens: int = 1 << 30
    ) -> ResolvedSampling:
        """Return the core's parameters. Each value is the client's, else the model's default, else one without effect.
        The argument `max_tokens`, the number of tokens left in the sequence, applies if the client set none.
        """

        def value_or_default(name: str, neutral: float) -> float:
            value = getattr(self, name)
            return defaults.get(name, neutral) if value is None else value

        for name in ("logit_bias", "allowed_token_ids", "banned_token_ids", "stop_token_ids"):
            _check_tokens(name, getattr(self, name) or (), vocabulary_size)
        eos_tokens = frozenset() if self.ignore_eos else frozenset(token for token in eos if token < vocabulary_size)
        return ResolvedSampling(
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            temperature=float(value_or_default("temperature", 1.0)),
            top_k=int(value_or_default("top_k", 0)),
            top_p=float(value_or_default("top_p", 1.0)),
            min_p=float(value_or_default("min_p", 0.0)),
            repetition_penalty=float(value_or_default("repetition_penalty", 1.0)),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            logit_bias=tuple(sorted((token, float(bias)) for token, bias in self.logit_bias.items())),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            banned_token_ids=tuple(self.banned_token_ids),
            min_tokens=self.min_tokens,
            stop_token_ids=eos_tokens | frozenset(self.stop_token_ids),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


def _to_tuple(name: str, values: Any) -> tuple[Any, ...]:
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidParameterError(f"expected {name} to be a list, got {_short(values)}", name)
    entries = tuple(dict.fromkeys(islice(values, MAX_LIST_LENGTH + 1)))
    if len(entries) > MAX_LIST_LENGTH:
        raise InvalidParameterError(f"expected at most {MAX_LIST_LENGTH} entries in {name}, got more", name)
    return entries


def _is_stop(text: object) -> bool:
    return isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS


def _check_range(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    low, high = limits.get("low"), limits.get("high")
    if value is None or low is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise InvalidParameterError(f"expected {name} to be a number from {low} to {high}, got {_short(value)}", name)
    if isinstance(low, int) and not isinstance(value, int):
        raise InvalidParameterError(f"expected {name} to be an integer, got {_short(value)}", name)


def _check_tokens(name: str, tokens: Any, vocabulary_size: int) -> None:
    # A list may contain a whole vocabulary, so the slow loop runs only to find an invalid token for the message.
    if not tokens or (set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < vocabulary_size):
        return
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary_size:
            raise InvalidParameterError(
                f"expected token ids from 0 to {vocabulary_size - 1} in {name}, got {_short(token)}", name
            )


def _short(value: object) -> str:
    """Return the beginning of a value for an error message. Long values are cut before `repr` runs."""
    short = value[:MAX_SHOWN_CHARS] if isinstance(value, str) else value
    if isinstance(value, Sequence) and not isinstance(value, str):
        short = [entry[:MAX_SHOWN_CHARS] if isinstance(entry, str) else entry for entry in value[:MAX_STOPS]]
    return repr(short)[:MAX_SHOWN_CHARS]
