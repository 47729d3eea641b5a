"""Convert body fields to sampling parameters and a grammar, refuse unsupported fields and requests that are too large,
and list the field names that bodies may have."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quire.api.dialects.body_shapes import Schema
from quire.api.dialects.field_names import FieldNames, names
from quire.api.dialects.openai.schemas import (
    CacheOptionsFields,
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    ResponseFields,
    SamplingFields,
    StreamOptionsFields,
    TokenizeFields,
)
from quire.api.dialects.resolved_request import ResolvedRequest
from quire.api.http.errors import invalid, unsupported
from quire.api.http.limits import MAX_ANSWER_LOGPROBS
from quire.client.request.params import Grammar, SamplingParams
from quire.core.request import PriorityClass
from quire.errors import RequestTooLargeError
from quire.strict_json import MAX_JSON_LISTS, has_too_many_lists

TIER_OF = {PriorityClass.HIGH: "priority", PriorityClass.NORMAL: "default", PriorityClass.LOW: "flex"}
"""The service tier to report for each priority class, by the API's name."""
SAME_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "ignore_eos", "stop", "stop_token_ids", "allowed_token_ids", "skip_special_tokens", "seed", "n",
    "prompt_logprobs",
)  # fmt: skip
"""Fields with the same name in the API and the engine; a missing or null field keeps the engine's default."""

UNSUPPORTED: Mapping[str, str] = {
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
    "suffix": "the models here only continue a text",
    "kv_transfer_params": "blocks are not moved between servers",
    "logprob_token_ids": "use logprobs",
    "repetition_detection": "use stop_loops, repetition_penalty or stop",
    "return_prompt_text": "use /tokenize and /detokenize",
}
"""Fields that quire does not support, with the reason or what to do instead."""
_CHANGES_PROMPT = ("functions", "chat_template", "truncate_prompt_tokens", "truncation_side", "prompt_embeds")
NOT_FOR_TOKENIZE = {name: UNSUPPORTED[name] for name in _CHANGES_PROMPT}
"""The unsupported fields that would change a prompt; `/tokenize` refuses only these."""

ADDED_TOKENS = {"add_special_tokens": "the chat template writes the special tokens of a conversation"}
NOT_FOR_COMPLETIONS: Mapping[str, str] = {
    **UNSUPPORTED,
    "tools": "tools are for conversations; use /v1/chat/completions",
    "thinking_token_budget": "thoughts are for conversations; use /v1/chat/completions",
}
NOT_FOR_CHATS: Mapping[str, str] = {
    **UNSUPPORTED,
    **ADDED_TOKENS,
    "echo": "conversations cannot be echoed; /v1/completions can echo a prompt",
}


def refuse(body: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise ApiError if one of these fields is set."""
    for name in reasons:
        if body.get(name):
            raise unsupported(name, reasons[name])


def reject_unsupported(body: Mapping[str, Any], reasons: Mapping[str, str] = UNSUPPORTED) -> None:
    """Raise ApiError for unsupported fields that would change the answer; they are never ignored."""
    refuse(body, reasons)
    if body.get("prompt_logprobs") is not None and body.get("stream"):
        raise unsupported("prompt_logprobs", "available with a whole response, not with a stream")
    if body.get("modalities") not in (None, ["text"]):
        raise unsupported("modalities", "text only")
    if body.get("length_penalty") not in (None, 1, 1.0):
        raise unsupported("length_penalty", "beam search is not available")


def sampling_params(fields: SamplingFields, **computed: Any) -> SamplingParams:
    """Return the engine's parameters. `computed` has the parameters that the dialect computed itself."""
    params: dict[str, Any] = {name: getattr(fields, name) for name in SAME_NAMES}
    params |= {"include_stop": fields.include_stop_str_in_output, "logit_bias": _biases(fields.logit_bias), **computed}
    params["grammar"] = grammar_of(fields)
    if params["top_k"] == -1:  # means "no limit" in this API
        params["top_k"] = 0
    if fields.cache_explain and params["prompt_logprobs"] is not None:
        # For a prompt's log-probabilities the whole prompt is computed, so its cached blocks are not used.
        message = "expected no cache_explain with log-probabilities of the prompt, for which the cache is not searched"
        raise invalid(message, "cache_explain", "invalid_parameter")
    return SamplingParams(**{name: value for name, value in params.items() if value is not None})


def _biases(biases: Mapping[str, float] | None) -> dict[int, float] | None:
    if biases is None:
        return None
    if not all(name.isdecimal() and len(name) < 12 and name.isascii() for name in biases):
        raise invalid("expected logit_bias to map token ids, integers, to numbers", "logit_bias", "invalid_parameter")
    return {int(name): bias for name, bias in biases.items()}


# -- grammar: several fields can constrain an answer, at most one may be set -------------------------------------------
#
# response_format        OpenAI: text, json_object, json_schema
# structured_outputs     vLLM: json, json_object, regex, choice, grammar; also its older fields guided_json and so on
# regex choice grammar   the same without a prefix

MakeGrammar = Callable[[Any, str], Grammar]


def _schema(schema: Any, name: str) -> Grammar:
    if isinstance(schema, str):
        if has_too_many_lists(schema):
            raise invalid(f"{name}: expected at most {MAX_JSON_LISTS:,} lists and objects; leave some out", name)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise invalid(f"{name}: expected a JSON schema, got text that is not JSON", name) from None
    return Grammar.json_schema(schema, name)


def _rules(text: Any, name: str) -> Grammar:
    return Grammar.gbnf(text, name) if isinstance(text, str) and "::=" in text else Grammar.lark(text, name)


def _object(_value: Any, _name: str) -> Grammar:
    return Grammar.json_object()


MAKERS: Mapping[str, MakeGrammar] = {
    "json": _schema,
    "json_object": _object,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": _rules,
}
"""By key of `structured_outputs`; the older fields have the same names with the prefix `guided_`."""
PLAIN = ("regex", "choice", "grammar")


def grammar_of(fields: SamplingFields) -> Grammar | None:
    """Return the grammar that the answer must match; None: no constraint. Raises ApiError if more than one is set."""
    candidates = [*_formats(fields.response_format), *_structured(fields.structured_outputs)]
    candidates += [(MAKERS[name], f"guided_{name}", getattr(fields, f"guided_{name}")) for name in MAKERS]
    candidates += [(MAKERS[name], name, getattr(fields, name)) for name in PLAIN]
    # `false` is a valid schema, but json_object: false means no grammar.
    found = [one for one in candidates if one[2] is not None and one != (_object, one[1], False)]
    if len(found) > 1:
        names = " and ".join(name for _, name, _ in found[:3])
        raise invalid(f"expected one grammar for a response, got {names}; leave all but one out", found[1][1])
    return found[0][0](found[0][2], found[0][1]) if found else None


def _formats(response_format: Mapping[str, Any] | None) -> list[tuple[MakeGrammar, str, Any]]:
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return []
    if kind == "json_object":
        return [(_object, "response_format", True)]
    inner = response_format.get("json_schema")
    if kind != "json_schema" or not isinstance(inner, Mapping) or inner.get("schema") is None:
        message = "expected response_format of type text, json_object, or json_schema with a schema in json_schema"
        raise invalid(f"{message}, got {str(kind)[:40]!r}", "response_format")
    return [(_schema, "response_format", inner["schema"])]


def _structured(outputs: Mapping[str, Any] | None) -> list[tuple[MakeGrammar, str, Any]]:
    strange = sorted(name for name, value in (outputs or {}).items() if value and name not in MAKERS)
    if strange:
        raise invalid(f"expected one of {', '.join(MAKERS)}, got {strange[0][:40]!r}", "structured_outputs")
    return [(MAKERS[name], "structured_outputs", value) for name, value in (outputs or {}).items() if name in MAKERS]


# -- bounds ------------------------------------------------------------------------------------------------------------


def check_bounds(request: ResolvedRequest, limit: int, num_prompt_times: int) -> None:
    """Raise if prompt and answer exceed the context, or a response could have too many log-probabilities. Runs before
    anything is computed.

    A prompt's log-probabilities appear `num_prompt_times` in the response. Those of streamed answers are not counted,
    because each is sent before the next one arrives.
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
    """Raise RequestTooLargeError if prompt and answer exceed the context; nothing is truncated silently."""
    if num_prompt_tokens + (1 if max_tokens is None else max_tokens) <= limit:
        return
    answer = f" and {max_tokens} for the answer" if max_tokens else ""
    raise RequestTooLargeError(
        f"got {num_prompt_tokens} tokens in the prompt{answer}; shorten the prompt or lower max_tokens"
    )


# -- names ------------------------------------------------------------------------------------------------------------

JUDGED = ("modalities", "length_penalty")
"""Fields that are refused if their value differs from the default behaviour."""


def _of(shape: type[Schema], *others: Iterable[str], **nested: FieldNames) -> FieldNames:
    """Return the field names of a schema, and additional names that are read from the raw body."""
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
    ChatFields, NOT_FOR_CHATS, JUDGED, **SAMPLING, messages=MESSAGE, tools=CHAT_TOOLS, tool_choice=TOOL_CHOICE
)
COMPLETION_NAMES = _of(CompletionFields, NOT_FOR_COMPLETIONS, JUDGED, **SAMPLING)
RESPONSE_NAMES = _of(
    ResponseFields,
    ("conversation", "prompt", "background"),
    input=ITEM,
    text=names("", format=names(f"type {' '.join(SCHEMA.read)}")),
    reasoning=names("effort"),
    prompt_cache_options=_of(CacheOptionsFields),
    tools=FieldNames(frozenset(("type", *FUNCTION.split())), types=("function",)),
    tool_choice=TOOL_CHOICE,
)
TOKENIZE_NAMES = _of(TokenizeFields, NOT_FOR_TOKENIZE, ADDED_TOKENS, messages=MESSAGE, tools=CHAT_TOOLS)
DETOKENIZE_NAMES = _of(DetokenizeFields)
