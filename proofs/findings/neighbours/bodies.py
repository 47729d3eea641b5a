"""Bodies of requests with a trap: they cost the server, and so other clients, much more than plain requests do.

Each request gets a new body, made from its number, so that no cache of earlier requests helps.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

Token = Callable[[str], int]
"""The first token of a text."""
Make = Callable[[int, Token], dict[str, Any]]
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Write a long list of words."}]
LONG = 1500
"""Tokens of an answer that lasts for the whole attack."""


@dataclass(frozen=True, slots=True)
class HarmfulBody:
    """How the bodies of an attack are made and sent."""

    make: Make
    plain: Callable[[int], dict[str, Any]] | None = None
    """What its plain twin has instead of the trap; None: the twin only lacks the fields with the trap."""
    num_connections: int = 4
    every_s: float = 0.5
    """How often a connection begins a request, at most."""
    leaves_after_s: float | None = None
    num_keys: int = 1


BODIES: dict[str, HarmfulBody] = {}


def _attack(name: str, **options: Any) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        BODIES[name] = HarmfulBody(make, **options)
        return make

    return register


def _chat(max_tokens: int = 64, **more: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "max_tokens": max_tokens, **more}


def _schema(schema: Mapping[str, Any], max_tokens: int = 64, **more: Any) -> dict[str, Any]:
    shape = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return _chat(max_tokens, response_format=shape, **more)


def _tool(name: str, properties: Mapping[str, Any], description: str = "") -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _odd(number: int, index: int) -> int:
    return 999_983 - 2 * (number * 100 + index)


# -- schemas -----------------------------------------------------------------------------------------------------------


@_attack("schema_multiples")
def _schema_multiples(number: int, token: Token) -> dict[str, Any]:
    properties = {f"a{i}": {"type": "integer", "multipleOf": _odd(number, i)} for i in range(12)}
    return _schema({"type": "object", "properties": properties, "required": list(properties)})


@_attack("schema_optional")
def _schema_optional(number: int, token: Token) -> dict[str, Any]:
    properties = {f"p{number}_{i}": {"type": "integer"} for i in range(250)}
    return _schema({"type": "array", "items": {"type": "object", "properties": properties}, "minItems": 3}, 200)


@_attack("schema_patterns")
def _schema_patterns(number: int, token: Token) -> dict[str, Any]:
    patterns = (".*a.{14}", "((a|aa)+)+", "(.{1,400}x){1,40}", ".*x.{9}.*x.{9}")
    properties = {
        f"p{i}": {"type": "string", "pattern": f"{patterns[i % 4]}{number}", "maxLength": 200} for i in range(24)
    }
    return _schema({"type": "object", "properties": properties, "required": list(properties)}, 300)


@_attack("schema_enum")
def _schema_enum(number: int, token: Token) -> dict[str, Any]:
    return _schema({"enum": [f"w{number:x}-{i:x}" for i in range(5000)]})


@_attack("schema_unions", num_connections=4, every_s=5.0)
def _schema_unions(number: int, token: Token) -> dict[str, Any]:
    """Branches that begin in the same way, so that all of them stay possible."""
    branches: list[Any] = []
    for i in range(60):
        names = [f"k{number}", *(f"b{position}" for position in range(i % 7))]
        value = {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "integer"}, {"type": "string"}]}}
        branches.append({"type": "object", "properties": dict.fromkeys(names, value), "additionalProperties": value})
    return _schema({"anyOf": branches}, LONG, n=8)


# -- regular expressions -----------------------------------------------------------------------------------------------


@_attack("regex_states", num_connections=4, every_s=5.0)
def _regex_states(number: int, token: Token) -> dict[str, Any]:
    return _chat(LONG, n=8, regex=f"(.|\\n)*a(.|\\n){{{14 + number % 3}}}b(.|\\n)*c(.|\\n){{15}}", temperature=1.5)


@_attack("regex_counted", num_connections=4, every_s=5.0)
def _regex_counted(number: int, token: Token) -> dict[str, Any]:
    return _chat(LONG, n=8, regex=f"((.|\\n){{1,{700 + number % 99}}}x){{1,700}}", temperature=1.2)


# -- grammars ----------------------------------------------------------------------------------------------------------


@_attack("grammar_ambiguous", num_connections=4, every_s=5.0)
def _grammar_ambiguous(number: int, token: Token) -> dict[str, Any]:
    return _chat(LONG, n=8, grammar='start: e\ne: e e | e e e | "a"')


@_attack("grammar_nullable", num_connections=4, every_s=5.0)
def _grammar_nullable(number: int, token: Token) -> dict[str, Any]:
    rules = "\n".join(f'r{i}: r{(i + 1) % 40}? r{(i + 7) % 40}? "a"? r{(i + 3) % 40}?' for i in range(40))
    return _chat(LONG, n=8, grammar=f"start: r0+\n{rules}\n")


@_attack("grammar_palindromes", num_connections=4, every_s=5.0)
def _grammar_palindromes(number: int, token: Token) -> dict[str, Any]:
    pairs = " | ".join(f'"{letter}" p "{letter}"' for letter in "abcdefgh ")
    return _chat(LONG, n=8, grammar=f'start: p p p\np: {pairs} | "a" | "" | p p')


@_attack("grammar_terminals")
def _grammar_terminals(number: int, token: Token) -> dict[str, Any]:
    names = [f"T{i}" for i in range(250)]
    terminals = "\n".join(f"{name}: /[a-z]{{1,{i + 2}}}x?{number}?/" for i, name in enumerate(names))
    return _chat(100, grammar=f"start: ({' | '.join(names)})+\n{terminals}\n")


@_attack("choice_many")
def _choice_many(number: int, token: Token) -> dict[str, Any]:
    return _chat(16, choice=[f"c{number}-{i}" for i in range(4000)])


# -- tools -------------------------------------------------------------------------------------------------------------


@_attack("tools_multiples", num_connections=2, every_s=2.5, leaves_after_s=2.0, num_keys=2)
def _tools_multiples(number: int, token: Token) -> dict[str, Any]:
    tools = [_tool(f"t{i}", {"a": {"type": "integer", "multipleOf": _odd(number, i)}}) for i in range(82)]
    return _chat(1, tools=tools)


@_attack("tools_unlike")
def _tools_unlike(number: int, token: Token) -> dict[str, Any]:
    """One of the tools makes no valid grammar, so each tool is checked alone."""
    shape = {"type": "string", "pattern": "(.{1,900}x){1,900}(.{1,900}y){1,900}"}
    properties = {f"p{i}": {"type": "string", "enum": [f"v{value}" for value in range(20)]} for i in range(6)}
    tools = [_tool(f"t{number}_{i}", properties) for i in range(12)]
    return _chat(1, tools=[*tools, _tool("bad", {"a": shape, "b": {"type": "integer", "multipleOf": 0.1}})])


@_attack("tools_fences", num_connections=4, every_s=5.0)
def _tools_fences(number: int, token: Token) -> dict[str, Any]:
    """At every token the text nearly becomes a tool call."""
    bias = {str(token("{")): 100, str(token("```")): 100, str(token('{"')): 100, str(token(" ")): 99}
    return _chat(LONG, n=8, tools=[_tool("t" * 128, {})], logit_bias=bias, temperature=2.0)


@_attack("tools_arrays", num_connections=4, every_s=5.0)
def _tools_arrays(number: int, token: Token) -> dict[str, Any]:
    bias = {str(token("[[")): 60, str(token("[")): 60, str(token('"')): -100}
    tools = [_tool("t", {"a": {}})]
    return _chat(LONG, n=8, tools=tools, tool_choice="required", logit_bias=bias)


# -- parsers of answers ------------------------------------------------------------------------------------------------


@_attack("answer_blanks", num_connections=4, every_s=5.0)
def _answer_blanks(number: int, token: Token) -> dict[str, Any]:
    """White space, after which a tool call may still follow."""
    tools, bias = [_tool("t", {})], {str(token(" " * 64)): 100}
    return _chat(LONG, n=8, tools=tools, logit_bias=bias)


@_attack("answer_usage", num_connections=4, every_s=5.0)
def _answer_usage(number: int, token: Token) -> dict[str, Any]:
    """Usage so far in every chunk."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    return _chat(LONG, n=8, stream=True, stream_options=options, logprobs=True, top_logprobs=20, ignore_eos=True)


@_attack("stop_texts", num_connections=4, every_s=5.0)
def _stop_texts(number: int, token: Token) -> dict[str, Any]:
    """Stop strings that are nearly complete at every token."""
    stops = [" a" * 510 + end for end in ("b", " b", "c", " c")]
    return _chat(LONG, n=8, stop=stops, logit_bias={str(token(" a")): 100}, ignore_eos=True)


# -- how tokens are chosen ---------------------------------------------------------------------------------------------


@_attack("logit_biases", num_connections=4, every_s=5.0)
def _logit_biases(number: int, token: Token) -> dict[str, Any]:
    bias = {str(i * 40 + number % 40): (i % 7) / 10 for i in range(1024)}
    more = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "top_p": 0.99, "min_p": 0.001}
    return _chat(LONG, n=8, logit_bias=bias, top_k=40_000, ignore_eos=True, temperature=1.5, **more)


@_attack("allowed_tokens", num_connections=4, every_s=5.0)
def _allowed_tokens(number: int, token: Token) -> dict[str, Any]:
    ids = list(range(number % 100, 49_000))
    Random(number).shuffle(ids)
    return _chat(LONG, n=8, allowed_token_ids=ids, temperature=1.5)


# -- prompts -----------------------------------------------------------------------------------------------------------


def _plain_words(num_chars: int) -> Callable[[int], dict[str, Any]]:
    def messages(number: int) -> dict[str, Any]:
        words = " ".join(Random(number).choices(("river", "stone", "light", "winter", "letter"), k=num_chars // 6))
        return {"messages": [{"role": "user", "content": words}]}

    return messages


@_attack("prompt_control", plain=_plain_words(60_000))
def _prompt_control(number: int, token: Token) -> dict[str, Any]:
    """Names of control tokens, which must be encoded as plain text."""
    text = "<|im_end|>\n<|im_start|>system\n" * 2_000 + str(number)
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


@_attack("prompt_word", plain=_plain_words(60_000))
def _prompt_word(number: int, token: Token) -> dict[str, Any]:
    """One word of 60,000 letters."""
    text = "".join(Random(number).choices("abcdefgh", k=60_000))
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


@_attack("prompt_calls", plain=_plain_words(51_000))
def _prompt_calls(number: int, token: Token) -> dict[str, Any]:
    """A history of tool calls, each with deeply nested arguments."""
    deep: Any = {"a": number}
    for _ in range(56):
        deep = {"a": [deep]}
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Go on."}]
    for i in range(60):
        arguments = json.dumps({"deep": deep, "at": i})
        call = {"id": f"call_{number}_{i}", "type": "function", "function": {"name": "t", "arguments": arguments}}
        turns.append({"role": "assistant", "content": None, "tool_calls": [call]})
        turns.append({"role": "tool", "tool_call_id": f"call_{number}_{i}", "content": "{}"})
    turns.append({"role": "user", "content": "Go on."})
    return {"messages": turns, "max_tokens": 1, "tools": [_tool("t", {})]}


@_attack("prompt_arguments", plain=_plain_words(1_700_000))
def _prompt_arguments(number: int, token: Token) -> dict[str, Any]:
    """A million lists in the arguments of an earlier call: JSON in a string, which the bound on bodies misses."""
    arguments = json.dumps({"number": number, "lists": [[[]]] * 280_000}, separators=(",", ":"))
    call = {"id": "call_1", "type": "function", "function": {"name": "t", "arguments": arguments}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}, *MESSAGES]
    return {"messages": [*MESSAGES, *turns], "max_tokens": 1, "tools": [_tool("t", {})]}


def _plain_changing(number: int) -> dict[str, Any]:
    """As many tokens as the attack has with SmolLM2's tokenizer: 3,490."""
    return _plain_words(9_000)(0) | {"messages": [{"role": "user", "content": f"{number} " + "river stone " * 1744}]}


@_attack("prompt_changing", plain=_plain_changing)
def _prompt_changing(number: int, token: Token) -> dict[str, Any]:
    """Prompts that differ in a hundred places, all of which the search for the reason of a cache miss must compare."""
    lines = [
        f"Line {i}: on {number % 28 + 1} May 2026 at {number % 24:02}:{i % 60:02} id {number * 7919 + i:08x}"
        for i in range(110)
    ]
    text = "\n".join(lines)
    return {"messages": [{"role": "system", "content": text}, *MESSAGES], "max_tokens": 1}


# -- bodies ------------------------------------------------------------------------------------------------------------


@_attack("body_nesting")
def _body_nesting(number: int, token: Token) -> dict[str, Any]:
    deep: Any = []
    for _ in range(50):
        deep = [deep]
    return _chat(1, metadata={"lists": [deep] * 17_000})
