"""What the fields of a body mean: sampling parameters, a class, a cache group, what is not supported; and the names
that bodies may have."""

from collections.abc import Iterable, Mapping
from typing import Any

from quire.api.access.auth import Caller
from quire.api.dialects.body_shapes import Loose
from quire.api.dialects.dialect import ResolvedRequest
from quire.api.dialects.field_names import FieldNames, names
from quire.api.dialects.openai.grammars import MAKERS, grammar_of
from quire.api.dialects.openai.schemas import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    ResponseFields,
    SamplingFields,
    StreamOptionsFields,
    TokenizeFields,
)
from quire.api.dialects.request_options import request_options
from quire.api.http.errors import invalid, unsupported
from quire.api.http.headers import Headers
from quire.api.http.limits import MAX_ANSWER_LOGPROBS
from quire.client.request.params import SamplingParams
from quire.client.request.requests import RequestOptions
from quire.core.request import PriorityClass
from quire.errors import RequestTooLargeError

TIERS = {"priority": PriorityClass.HIGH, "flex": PriorityClass.LOW}
TIER_OF = {PriorityClass.HIGH: "priority", PriorityClass.NORMAL: "default", PriorityClass.LOW: "flex"}
"""The tier that was used, by its public name."""
SAME_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "ignore_eos", "stop", "stop_token_ids", "allowed_token_ids", "skip_special_tokens", "seed", "n",
    "prompt_logprobs",
)  # fmt: skip
"""Fields that are called the same here and in the engine; one that is missing or null keeps its default."""

NOT_BUILT: Mapping[str, str] = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "use_beam_search": "beam search is not available",
    "bad_words": "only single tokens can be banned, with logit_bias",
    "truncate_prompt_tokens": "prompts are never truncated silently",
    "truncation_side": "prompts are never truncated silently",
    "chat_template": "requests cannot set the chat template",
    "prompt_embeds": "clients cannot send tensors",
    "audio": "text only",
    "web_search_options": "this server sends no requests to other services",
    "suffix": "the models here continue a text and do not fill gaps",
    "kv_transfer_params": "blocks are not moved between servers",
    "logprob_token_ids": "use logprobs",
    "repetition_detection": "use repetition_penalty or stop",
    "return_prompt_text": "use /tokenize and /detokenize",
}


_PROMPTS = ("functions", "chat_template", "truncate_prompt_tokens", "truncation_side", "prompt_embeds")
OF_PROMPTS = {name: NOT_BUILT[name] for name in _PROMPTS}
"""Those of them that would change a prompt: all that matters where nothing is generated."""

ADDED_TOKENS = {"add_special_tokens": "the chat template writes the special tokens of a conversation"}
NOT_OF_COMPLETIONS: Mapping[str, str] = {
    **NOT_BUILT,
    "tools": "tools are for conversations; use /v1/chat/completions",
    "thinking_token_budget": "thoughts are for conversations; use /v1/chat/completions",
}
NOT_OF_CHATS: Mapping[str, str] = {
    **NOT_BUILT,
    **ADDED_TOKENS,
    "echo": "conversations cannot be echoed; /v1/completions can echo a prompt",
}


def refuse_of(body: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse these where they are set."""
    for name in reasons:
        if body.get(name):
            raise unsupported(name, reasons[name])


def reject_unsupported(body: Mapping[str, Any], reasons: Mapping[str, str] = NOT_BUILT) -> None:
    """Never ignore what would change the answer."""
    refuse_of(body, reasons)
    if body.get("prompt_logprobs") is not None and body.get("stream"):
        raise unsupported("prompt_logprobs", "available with a whole response, not with a stream")
    if body.get("modalities") not in (None, ["text"]):
        raise unsupported("modalities", "text only")
    if body.get("length_penalty") not in (None, 1, 1.0):
        raise unsupported("length_penalty", "beam search is not available")


def sampling_params(fields: SamplingFields, **settled: Any) -> SamplingParams:
    """The engine's parameters; those that a dialect reads in its own way are passed in."""
    params: dict[str, Any] = {name: getattr(fields, name) for name in SAME_NAMES}
    params |= {"include_stop": fields.include_stop_str_in_output, "logit_bias": _biases(fields.logit_bias), **settled}
    params["grammar"] = grammar_of(fields)
    if params["top_k"] == -1:  # all, by the API's convention
        params["top_k"] = 0
    if fields.cache_explain and params["prompt_logprobs"] is not None:
        # All of the prompt is computed for them.
        message = "expected no cache_explain with log-probabilities of the prompt: the cache is not searched then"
        raise invalid(message, "cache_explain", "invalid_parameter")
    return SamplingParams(**{name: value for name, value in params.items() if value is not None})


def _biases(biases: Mapping[str, float] | None) -> dict[int, float] | None:
    if biases is None:
        return None
    if not all(name.isdecimal() and len(name) < 12 and name.isascii() for name in biases):
        raise invalid("expected logit_bias to map token ids, integers, to numbers", "logit_bias", "invalid_parameter")
    return {int(name): bias for name, bias in biases.items()}


def options(fields: SamplingFields, caller: Caller, headers: Headers) -> RequestOptions:
    """Tenant, priority and cache group of a body."""
    tier = TIERS.get(fields.service_tier or "", PriorityClass.NORMAL)
    return request_options(caller, headers, tier, fields.priority, fields.cache_salt)


def check_bounds(request: ResolvedRequest, limit: int, num_prompt_times: int) -> None:
    """Raise if prompts and answers do not fit, or an answer would hold too many log-probabilities: before anything is
    computed.

    Those of a prompt are repeated so many times. Those of streamed answers are sent before the next ones come.
    """
    params = request.params
    for ids in request.prompts:
        _check_room(len(ids), params.max_tokens, limit)
    if params.logprobs is None and params.prompt_logprobs is None:
        return
    num_of_prompt = 0 if params.prompt_logprobs is None else num_prompt_times * (1 + params.prompt_logprobs)
    num_of_answer = 0 if params.logprobs is None or request.is_streamed else params.n * (1 + params.logprobs)
    most = limit if params.max_tokens is None else params.max_tokens
    lengths = [(len(ids), min(most, limit - len(ids))) for ids in request.prompts]
    count = sum(num_of_prompt * num_prompt + num_of_answer * num_answer for num_prompt, num_answer in lengths)
    if count <= MAX_ANSWER_LOGPROBS:
        return
    raise invalid(
        f"expected at most {MAX_ANSWER_LOGPROBS} log-probabilities in a response, every alternative counted, for each "
        f"of n answers to each prompt, got {count}; request fewer alternatives, a smaller n, a lower max_tokens, or "
        "fewer or shorter prompts",
        "logprobs" if params.prompt_logprobs is None else "prompt_logprobs",
        "invalid_parameter",
    )


def _check_room(num_prompt_tokens: int, max_tokens: int | None, limit: int) -> None:
    """Prompt and answer must fit; nothing is truncated silently."""
    if num_prompt_tokens + (1 if max_tokens is None else max_tokens) <= limit:
        return
    answer = f" and {max_tokens} for the answer" if max_tokens else ""
    raise RequestTooLargeError(
        f"got {num_prompt_tokens} tokens in the prompt{answer}; shorten the prompt or lower max_tokens"
    )


# -- names ------------------------------------------------------------------------------------------------------------

JUDGED = ("modalities", "length_penalty")
"""Refused if they request anything else than what is done."""


def _of(shape: type[Loose], *others: Iterable[str], **nested: FieldNames) -> FieldNames:
    """The fields of a schema, and others that are read from the raw body."""
    return FieldNames(frozenset(shape.model_fields).union(*others, nested), nested)


STREAM_OPTIONS = _of(StreamOptionsFields)
SCHEMA = names("schema name description strict")
FUNCTION = "name description parameters strict"
CHAT_TOOLS = FieldNames(frozenset(("type", "function")), {"function": names(FUNCTION)}, ("function", None))
TOOL_CHOICE = names("type name", function=names("name"))
MESSAGE = FieldNames(
    frozenset(("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "refusal")),
    is_open=True,
)
ITEM = FieldNames(
    frozenset(("type", "role", "content", "id", "status", "call_id", "name", "arguments", "output", "summary")),
    is_open=True,
)
SAMPLING = {
    "stream_options": STREAM_OPTIONS,
    "response_format": names("type", json_schema=SCHEMA),
    "structured_outputs": FieldNames(frozenset(MAKERS)),
}
CHAT_NAMES = _of(
    ChatFields, NOT_OF_CHATS, JUDGED, **SAMPLING, messages=MESSAGE, tools=CHAT_TOOLS, tool_choice=TOOL_CHOICE
)
COMPLETION_NAMES = _of(CompletionFields, NOT_OF_COMPLETIONS, JUDGED, **SAMPLING)
RESPONSE_NAMES = _of(
    ResponseFields,
    ("conversation", "prompt", "background"),
    input=ITEM,
    text=names("", format=names(f"type {' '.join(SCHEMA.read)}")),
    reasoning=names("effort"),
    tools=FieldNames(frozenset(("type", *FUNCTION.split())), types=("function",)),
    tool_choice=TOOL_CHOICE,
)
TOKENIZE_NAMES = _of(TokenizeFields, OF_PROMPTS, ADDED_TOKENS, messages=MESSAGE, tools=CHAT_TOOLS)
DETOKENIZE_NAMES = _of(DetokenizeFields)
