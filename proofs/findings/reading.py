"""All readers and writers of untrusted text take linear time: the ratio of processor times for 4 MB and 2 MB is judged.

Functions with `_reads` make the worst input, up to `max_bytes`, the limit of the API. Quadratic work has a ratio of 4.
"""

import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.record import say
from benchmarks.test_model import smollm2_directory
from proofs.framework.proof import Proof, section
from quire.api.dialects.anthropic.schemas import MessagesFields
from quire.api.dialects.anthropic.turns import messages_of_turns
from quire.api.dialects.anthropic.writer import MessagesWriter
from quire.api.dialects.body_shapes import validated
from quire.api.dialects.images import ImagePolicy
from quire.api.dialects.openai.completions import CompletionWriter
from quire.api.dialects.openai.response_items import messages_of_items
from quire.api.dialects.openai.response_writer import ItemsWriter
from quire.api.dialects.openai.schemas import ChatFields, CompletionFields, ResponseFields, parse_fields
from quire.api.http.body import parse_object
from quire.api.http.errors import ApiError
from quire.api.http.limits import MAX_BODY_BYTES
from quire.client.prefix.prompt_alignment import gaps_between, packed
from quire.client.reply.outputs import Piece
from quire.client.reply.reply import Reply
from quire.client.reply.stream import MAX_PENDING_BYTES, Stream
from quire.client.request.params import SamplingParams
from quire.client.request.requests import make_request
from quire.client.request.text_model import num_text_bytes
from quire.core.events import Token
from quire.errors import QuireError
from quire.fleet.openai.stream import MAX_LINE_BYTES, OpenAIStream
from quire.http_client import SseReader
from quire.text.chat.canonical import TemplateSupport, canonical
from quire.text.chat.changing_text import line_pattern
from quire.text.chat.control_tokens import ChatTokenizer
from quire.text.chat.prompt_parts import char_spans
from quire.text.chat.rendering.marked_text import concat, mark
from quire.text.chat.rendering.messages import prepare_messages
from quire.text.chat.rendering.sandbox import to_json
from quire.text.chat.stable_prefix import StablePrefix
from quire.text.chat.tools import Tool
from quire.text.detokenizer import AnswerText, Detokenizer
from quire.text.grammars.answer_grammar import AnswerRules, CallableTool, ToolRules, answer_grammar
from quire.text.grammars.grammar import MAX_TEXT_BYTES, Grammar, bounded_schema
from quire.text.parsers.parts import TEXT, ToolCallPart
from quire.text.parsers.reader import AnswerFormat, AnswerReader
from quire.text.parsers.tool_format import HERMES, ReasoningFormat
from quire.text.sandboxed.messages import Rendered
from quire.text.tokenizer import Tokenizer
from tests.support.models.small_tokenizers import byte_level
from tests.support.servers.talkers import talker
from tests.support.servers.tool_formats import FORMATS, TAGGED

MAX_RATIO = 2.6
UNBOUNDED = 1 << 40
MIN_TOTAL_S, MAX_RUNS = 0.3, 30
THOUGHTS = ReasoningFormat("<think>", "</think>")
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Reading:
    """One reader or writer."""

    prepare: Callable[[int], Work]
    """Makes the worst input of so many bytes, and returns the work with it, which is timed."""
    max_bytes: int = UNBOUNDED
    """The largest input that the API accepts."""


READINGS: dict[str, Reading] = {}


def _reads(name: str, max_bytes: int = UNBOUNDED) -> Callable[[Callable[[int], Work]], Callable[[int], Work]]:
    def register(prepare: Callable[[int], Work]) -> Callable[[int], Work]:
        READINGS[name] = Reading(prepare, max_bytes)
        return prepare

    return register


@section("readers")
def readers(proof: Proof) -> None:
    """Measure all readers and writers; the largest ratio is judged."""
    size, num_runs = int(proof.sized(quick=50_000, full=4_000_000)), int(proof.sized(quick=3, full=5))
    ratios = {name: _ratio(reading, min(size, reading.max_bytes), num_runs) for name, reading in READINGS.items()}
    for name, ratio in sorted(ratios.items(), key=lambda pair: -pair[1]):
        proof.report(f"quadratic_{name}", ratio)
    slow_names = [name for name, ratio in ratios.items() if ratio > MAX_RATIO]
    say(f"  above {MAX_RATIO}: {', '.join(slow_names) or 'none'}")
    proof.at_least("quadratic_readers", len(ratios), 20)
    proof.at_most("quadratic", max(ratios.values()), MAX_RATIO, f"of {max(ratios, key=lambda name: ratios[name])}")


def _ratio(reading: Reading, size: int, num_runs: int) -> float:
    """The least time for `size` bytes over that for half of them. Runs alternate; short runs are repeated."""
    min_s = {size: float("inf"), size // 2: float("inf")}
    num_done, sum_s = 0, 0.0
    while num_done < num_runs or (sum_s < MIN_TOTAL_S and num_done < MAX_RUNS):
        for run_size, old_s in min_s.items():
            work = reading.prepare(run_size)
            gc.collect()
            start_s = time.process_time()
            work()
            run_s = time.process_time() - start_s
            min_s[run_size], sum_s = min(old_s, run_s), sum_s + run_s
        num_done += 1
    return min_s[size] / min_s[size // 2]


# -- answers -----------------------------------------------------------------------------------------------------------


def _answer(fmt: AnswerFormat, start: str, piece: str, size: int) -> Work:
    pieces = [start, *[piece] * (size // len(piece))]

    def read() -> None:
        reader = AnswerReader(fmt, str)
        for text in pieces:
            reader.push(text)
        reader.finish()

    return read


ANSWERS: Mapping[str, tuple[AnswerFormat, str, str]] = {
    "blanks_before_call": (AnswerFormat(tools=HERMES), "a", " " * 64),
    "blanks_before_thought": (AnswerFormat(reasoning=THOUGHTS), "", " " * 64),
    "blanks_in_thought": (AnswerFormat(reasoning=THOUGHTS, is_thinking=True), "a", "\n"),
    "blanks_bare": (AnswerFormat(tools=FORMATS["bare"]), "", " \t"),
    "half_marks": (AnswerFormat(tools=HERMES), "", "<tool_call"),
    "half_thought_ends": (AnswerFormat(reasoning=THOUGHTS, is_thinking=True), "", "</think"),
    "half_objects": (AnswerFormat(tools=HERMES, text_keys={"f": frozenset()}), "", '```json {"name": "' + "f" * 128),
    "braces": (AnswerFormat(tools=HERMES, text_keys={"f": frozenset()}), "", "{`"),
    "call_name": (AnswerFormat(tools=TAGGED), "<tool_call>\n<function=", "a" * 16),
    "call_key": (AnswerFormat(tools=TAGGED), "<tool_call>\n<function=f>\n<parameter=", "a>"),
    "call_text": (
        AnswerFormat(tools=TAGGED, text_keys={"f": frozenset({"a"})}),
        "<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter",
    ),
    "call_nesting": (AnswerFormat(tools=HERMES), '<tool_call>\n{"name": "f", "arguments": ', '{"a": ['),
    "call_backslashes": (AnswerFormat(tools=HERMES), '<tool_call>\n{"name": "f", "arguments": {"a": "', "\\\\"),
    "calls": (AnswerFormat(tools=HERMES), "", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'),
}  # fmt: skip
for _name, (_fmt, _start, _piece) in ANSWERS.items():
    _reads(f"answer_{_name}")(lambda size, f=_fmt, s=_start, p=_piece: _answer(f, s, p, size))  # type: ignore[misc]


@_reads("stop_strings")
def _stop_strings(size: int) -> Work:
    """Four stop strings of the greatest length, each nearly complete at every character."""
    stops = ["a" * 1023 + end for end in "bcde"]
    letter = byte_level().encode("a", add_special_tokens=False)[0]

    def read() -> None:
        text = AnswerText(byte_level(), [letter], stops)
        for _ in range(size):
            text.push(letter)
        text.finish()

    return read


@_reads("half_utf8")
def _half_utf8(size: int) -> Work:
    """Bytes that begin UTF-8 characters without ending them."""
    tokenizer = byte_level()
    ids = [next(i for i in range(256) if tokenizer.bytes.in_text[i] == byte) for byte in (b"\xf0", b"\x9f")]

    def read() -> None:
        text = Detokenizer(tokenizer, ids)
        for i in range(size):
            text.push(ids[i % 2])
        text.finish()

    return read


def _streamed(size: int, writer: Any, part: Any = TEXT) -> Work:
    """Write a chunk for each of `size` tokens."""
    text, params = talker().text, SamplingParams(max_tokens=4)
    reply = Reply(make_request(text, [1, 2, 3], params), params, text.tokenizer)

    def write() -> None:
        for i in range(size):
            reply.take([Token("r", 0, 4, i + 1, None)])
            writer.pieces([reply], [(0, Piece(0, "a", (4,), part=part if part is TEXT else part(i)))])

    return write


@_reads("usage_in_chunks")
def _usage_in_chunks(size: int) -> Work:
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = CompletionFields.model_validate({"prompt": [1], "stream": True, "stream_options": options})
    return _streamed(size // 16, CompletionWriter("m", fields))


@_reads("items_of_calls")
def _items_of_calls(size: int) -> Work:
    writer = ItemsWriter("m", ResponseFields.model_validate({"input": "a"}))
    return _streamed(size // 64, writer, lambda i: ToolCallPart(i, "id", "f"))


@_reads("blocks_of_calls")
def _blocks_of_calls(size: int) -> Work:
    return _streamed(size // 64, MessagesWriter("m"), lambda i: ToolCallPart(i, "id", "f"))


@_reads("stream_not_read", max_bytes=MAX_PENDING_BYTES // 64)
def _stream_not_read(size: int) -> Work:
    """A client that reads nothing: the stream buffers tool calls, up to its limit."""

    def fill() -> None:
        stream = Stream("r", lambda _: None)
        for i in range(size):
            stream.put([Piece(0, "a", (1,), part=ToolCallPart(i, "id", "f"))])
        stream.take()

    return fill


# -- bodies ------------------------------------------------------------------------------------------------------------


def _body(value: object, *, is_valid: bool = True) -> Work:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()

    def read() -> None:
        try:
            parse_object(data)
        except ApiError:
            if is_valid:
                raise

    return read


@_reads("body_escapes", max_bytes=MAX_BODY_BYTES)
def _body_escapes(size: int) -> Work:
    return _body(b'{"a": "' + b"\\\\\\u00e9" * (size // 8 - 2) + b'"}')


@_reads("body_half_pairs", max_bytes=MAX_BODY_BYTES)
def _body_half_pairs(size: int) -> Work:
    return _body(b'{"a": "' + b"\\u00e9" * (size // 6 - 3) + b'\\ud83d"}', is_valid=False)


@_reads("body_numbers", max_bytes=MAX_BODY_BYTES)
def _body_numbers(size: int) -> Work:
    return _body({"a": [1] * (size // 3 - 5)})


@_reads("body_one_number", max_bytes=MAX_BODY_BYTES)
def _body_one_number(size: int) -> Work:
    return _body(b'{"a": 0.' + b"9" * (size - 20) + b"}")


@_reads("body_whole_number", max_bytes=MAX_BODY_BYTES)
def _body_whole_number(size: int) -> Work:
    return _body(b'{"a": ' + b"9" * (size - 20) + b"}", is_valid=False)


@_reads("body_nesting", max_bytes=MAX_BODY_BYTES)
def _body_nesting(size: int) -> Work:
    return _body(b"[" * size, is_valid=False)


@_reads("body_lists", max_bytes=MAX_BODY_BYTES)
def _body_lists(size: int) -> Work:
    return _body({"a": [[[[["[" * 160]]]]] * (size // 192)})


@_reads("body_keys", max_bytes=MAX_BODY_BYTES)
def _body_keys(size: int) -> Work:
    return _body({f"k{i:08}": 1 for i in range(size // 16)})


@_reads("body_open_text", max_bytes=MAX_BODY_BYTES)
def _body_open_text(size: int) -> Work:
    return _body(b'{"a":[' * 70 + b'"' * (size - 500), is_valid=False)


def _fields(shape: type[Any], body: dict[str, Any]) -> Work:
    return lambda: parse_fields(shape, body)


@_reads("chat_fields", max_bytes=MAX_BODY_BYTES)
def _chat_fields(size: int) -> Work:
    part = {"type": "text", "text": ""}
    return _fields(ChatFields, {"messages": [{"role": "user", "content": [part] * (size // 32)}]})


@_reads("completion_fields", max_bytes=MAX_BODY_BYTES)
def _completion_fields(size: int) -> Work:
    ids = list(range(size // 7))
    fields = {"prompt": ids, "allowed_token_ids": ids, "stop_token_ids": ids}

    def read() -> None:
        parsed = parse_fields(CompletionFields, fields)
        params = SamplingParams(
            allowed_token_ids=parsed.allowed_token_ids[: 1 << 18], stop_token_ids=parsed.stop_token_ids[: 1 << 18]
        )
        params.resolve({}, frozenset(), 1 << 30)

    return read


@_reads("response_items", max_bytes=MAX_BODY_BYTES)
def _response_items(size: int) -> Work:
    item = {"role": "assistant", "content": "a" * 16}
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    fields = ResponseFields.model_construct(input=[item, call] * (size // 128))
    return lambda: messages_of_items(fields, ImagePolicy(False))


@_reads("message_turns", max_bytes=MAX_BODY_BYTES)
def _message_turns(size: int) -> Work:
    blocks = [{"type": "thinking", "thinking": "a"}, {"type": "text", "text": "b"}] * (size // 128)
    results = [{"type": "tool_result", "content": [{"type": "text", "text": "c"}]}] * (size // 128)
    turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    fields = validated(MessagesFields, {"messages": turns, "max_tokens": 1})
    return lambda: messages_of_turns(fields, ImagePolicy(False))


# -- prompts -----------------------------------------------------------------------------------------------------------


@_reads("messages", max_bytes=MAX_BODY_BYTES)
def _messages(size: int) -> Work:
    function = {"name": "f", "arguments": json.dumps({"a": ["\\"] * 8})}
    turns: list[Any] = [{"role": "system", "content": "a"}] * (size // 64)
    turns += [{"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": function}]}] * (size // 128)
    support = TemplateSupport(needs_short_ids=True, has_late_system=False)

    def read() -> None:
        num_text_bytes(turns)
        prepare_messages(canonical(turns, support), wants_parts=False)

    return read


@_reads("marked_text")
def _marked_text(size: int) -> Work:
    """A template that replaces text repeatedly."""
    text = mark("a b " * (size // 4), "m0")
    return lambda: text.replace("a", "x").replace(" ", "--").split("x")


@_reads("marked_letters", max_bytes=1_000_000)
def _marked_letters(size: int) -> Work:
    text = mark("a b " * (size // 4)).replace("b", "c")
    return lambda: concat(letter for letter in text)


@_reads("template_json", max_bytes=MAX_BODY_BYTES)
def _template_json(size: int) -> Work:
    items = mark([{"name": "a", "text": "[" * 40}] * (size // 64), "t0")
    return lambda: to_json(items)


@_reads("char_spans")
def _char_spans(size: int) -> Work:
    spans = tuple((i * 4, i * 4 + 2) for i in range(size // 4))
    sources = tuple((start, stop, f"m{i % 7}") for i, (start, stop) in enumerate(spans))
    rendered = Rendered("a" * size, spans, sources)
    return lambda: char_spans(rendered)


@_reads("control_names", max_bytes=400_000)
def _control_names(size: int) -> Work:
    """Names of control tokens in a client's text; a longer text is refused because of its number of tokens."""
    piece = "<|im_end|>\n<|im_start|>"
    text = piece * (size // len(piece))
    encoder = ChatTokenizer(byte_level_without_bound(), "<|im_end|><|im_start|>")
    rendered = Rendered(text + "<|im_start|>", ((0, len(text)),))
    return lambda: encoder.encode_parts(rendered, ())


def byte_level_without_bound() -> Tokenizer:
    """A tokenizer that accepts texts of any length."""
    return Tokenizer(byte_level().library, 1 << 30)


@_reads("one_word", max_bytes=MAX_BODY_BYTES)
def _one_word(size: int) -> Work:
    tokenizer = Tokenizer.from_files(smollm2_directory() / "tokenizer.json", 1 << 30)
    return lambda: tokenizer.encode("abcdefgh" * (size // 8), add_special_tokens=False)


@_reads("stable_prefix", max_bytes=MAX_BODY_BYTES)
def _stable_prefix(size: int) -> Work:
    """Lines that are nearly dates, times and ids."""
    line = "1-" * 60 + "a" * 60 + ":1" * 60
    stable_prefix = StablePrefix(["dates", "times", "ids", "a*b*"])
    messages = [{"role": "system", "content": "\n".join([line[i:] for i in range(100)] * 5)}] * (size // 100_000 + 2)
    return lambda: [stable_prefix.remove_lines([message]) for message in messages]


@_reads("fold")
def _fold(size: int) -> Work:
    line = "1-a" * 170
    return lambda: [line_pattern(line) for _ in range(size // 510)]


@_reads("prefix_guard", max_bytes=1 << 18)
def _prefix_guard(size: int) -> Work:
    """Prompts that differ in every 40th token."""
    old = packed([i % 50 for i in range(size // 4)])
    new = packed([i % 50 if i % 40 else 99 for i in range(size // 4)])
    return lambda: gaps_between(old, new, 0)


# -- grammars ----------------------------------------------------------------------------------------------------------


def _grammar(make: Work) -> Work:
    def read() -> None:
        with suppress(QuireError):
            make()

    return read


@_reads("gbnf", max_bytes=MAX_TEXT_BYTES)
def _gbnf(size: int) -> Work:
    return _grammar(lambda: Grammar.gbnf("root ::= " + '"a" | ' * (size // 6 - 10) + '"b"'))


@_reads("gbnf_backslashes", max_bytes=MAX_TEXT_BYTES)
def _gbnf_backslashes(size: int) -> Work:
    return _grammar(lambda: Grammar.gbnf('root ::= "' + "\\\\" * (size // 2 - 20) + '"'))


@_reads("lark_brackets", max_bytes=MAX_TEXT_BYTES)
def _lark_brackets(size: int) -> Work:
    return _grammar(lambda: Grammar.lark("start: " + "(" * (size // 2 - 10) + ")" * (size // 2 - 10)))


@_reads("regex_text", max_bytes=MAX_TEXT_BYTES)
def _regex_text(size: int) -> Work:
    return _grammar(lambda: Grammar.regex("(a|" * (size // 4) + ")" * (size // 4)))


@_reads("choice", max_bytes=MAX_TEXT_BYTES)
def _choice(size: int) -> Work:
    return _grammar(lambda: Grammar.choice([f"c{i:06}" for i in range(size // 12)]))


@_reads("schema_bounds", max_bytes=MAX_BODY_BYTES)
def _schema_bounds(size: int) -> Work:
    schema: Any = {"type": "array", "items": [{"type": "integer"}, {"enum": [1, 2]}] * (size // 64)}
    return lambda: bounded_schema(schema, "s")


@_reads("tool_grammar", max_bytes=MAX_TEXT_BYTES)
def _tool_grammar(size: int) -> Work:
    properties = {f"p{i}": {"type": "string", "enum": ["a" * 16]} for i in range(8)}
    schema = Tool("t", "", {"type": "object", "properties": properties}).schema
    tools = [CallableTool(f"t{i}", schema) for i in range(size // 256)]
    marks = {f"<mark{i}>": i for i in range(500)}
    rules = AnswerRules(calls=ToolRules(TAGGED, tools), reasoning=THOUGHTS)
    return lambda: answer_grammar(rules, marks)


# -- streams of other servers ------------------------------------------------------------------------------------------


def _feed_sse(chunks: Sequence[bytes]) -> Work:
    def read() -> None:
        reader = SseReader(4_000_000)
        for chunk in chunks:
            reader.feed(chunk)

    return read


@_reads("stream_line", max_bytes=4_000_000)
def _stream_line(size: int) -> Work:
    return _feed_sse([b"data"] * (size // 4))


@_reads("stream_events")
def _stream_events(size: int) -> Work:
    return _feed_sse([b"data: a\n\n" * 4096] * (size // 36_864 + 1))


@_reads("watched_lines", max_bytes=4_000_000)
def _watched_lines(size: int) -> Work:
    return _feed_sse([b"event: snapshot\n", *[b"data: a\n"] * (size // 8), b"\n"])


def _feed_member(chunks: Sequence[bytes]) -> Work:
    """The stream of a member that is not quire, up to its first error."""

    def read() -> None:
        stream = OpenAIStream((1, 2, 3), 49_152, None, 1 << 22)
        with suppress(QuireError):
            for chunk in chunks:
                stream.feed(chunk)

    return read


@_reads("member_tokens")
def _member_tokens(size: int) -> Work:
    line = b'data: {"choices":[{"index":0,"token_ids":[1]}]}\n\n'
    return _feed_member([line] * (size // len(line)))


@_reads("member_line", max_bytes=MAX_LINE_BYTES)
def _member_line(size: int) -> Work:
    """One line without an end, in small pieces."""
    return _feed_member([b"data: ", *[b"[[[["] * (size // 4 - 4)])


@_reads("member_list", max_bytes=MAX_LINE_BYTES)
def _member_list(size: int) -> Work:
    ids = b",".join([b"1"] * (size // 2 - 40))
    return _feed_member([b'data: {"choices":[{"index":0,"token_ids":[' + ids + b"]}]}\n\n"])
