"""What reads and writes outsiders' texts costs their length: processor time for 4 MB over 2 MB, of the nastiest text.

A line in a table for each: what is fed, and how much a door lets in at most. A square would cost four times as much.
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
from quire.api.dialects.openai.logprobs import TokenNames
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
from quire.text.chat.changing_text import fold
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
NO_DOOR = 1 << 40
SHORT_S, MAX_RUNS = 0.3, 30
THOUGHTS = ReasoningFormat("<think>", "</think>")
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Reading:
    """One reader or writer."""

    prepared: Callable[[int], Work]
    """What is timed, with so many bytes of its nastiest text made before."""
    most: int = NO_DOOR
    """Bytes that a door lets in."""


READINGS: dict[str, Reading] = {}


def _reads(name: str, most: int = NO_DOOR) -> Callable[[Callable[[int], Work]], Callable[[int], Work]]:
    def listed(prepared: Callable[[int], Work]) -> Callable[[int], Work]:
        READINGS[name] = Reading(prepared, most)
        return prepared

    return listed


@section("readers")
def readers(proof: Proof) -> None:
    """Each line of the table; the worst is judged."""
    size, runs = int(proof.sized(quick=50_000, full=4_000_000)), int(proof.sized(quick=3, full=5))
    ratios = {name: _ratio(one, min(size, one.most), runs) for name, one in READINGS.items()}
    for name, ratio in sorted(ratios.items(), key=lambda pair: -pair[1]):
        proof.report(f"quadratic_{name}", ratio)
    beyond = [name for name, ratio in ratios.items() if ratio > MAX_RATIO]
    say(f"  beyond {MAX_RATIO}: {', '.join(beyond) or 'none'}")
    proof.at_least("quadratic_readers", len(ratios), 20)
    proof.at_most("quadratic", max(ratios.values()), MAX_RATIO, f"of {max(ratios, key=lambda one: ratios[one])}")


def _ratio(reading: Reading, size: int, num_runs: int) -> float:
    """In turns, so that a machine that becomes slower is slower for both; short ones more often."""
    least = {size: float("inf"), size // 2: float("inf")}
    num_done, sum_s = 0, 0.0
    while num_done < num_runs or (sum_s < SHORT_S and num_done < MAX_RUNS):
        for one, before_s in least.items():
            work = reading.prepared(one)
            gc.collect()
            start_s = time.process_time()
            work()
            taken_s = time.process_time() - start_s
            least[one], sum_s = min(before_s, taken_s), sum_s + taken_s
        num_done += 1
    return least[size] / least[size // 2]


# -- answers -----------------------------------------------------------------------------------------------------------


def _answer(form: AnswerFormat, before: str, piece: str, size: int) -> Work:
    pieces = [before, *[piece] * (size // len(piece))]

    def read() -> None:
        reader = AnswerReader(form, str)
        for one in pieces:
            reader.push(one)
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
for _name, (_form, _before, _piece) in ANSWERS.items():
    _reads(f"answer_{_name}")(lambda size, f=_form, b=_before, p=_piece: _answer(f, b, p, size))  # type: ignore[misc]


@_reads("stop_strings")
def _stop_strings(size: int) -> Work:
    """Four texts of the longest kind, each nearly there at every character."""
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
    """Bytes that begin characters and never end them."""
    tokenizer = byte_level()
    ids = [next(one for one in range(256) if tokenizer.bytes.in_text[one] == byte) for byte in (b"\xf0", b"\x9f")]

    def read() -> None:
        text = Detokenizer(tokenizer, ids)
        for at in range(size):
            text.push(ids[at % 2])
        text.finish()

    return read


def _streamed(size: int, writer: Any, part: Any = TEXT) -> Work:
    """A chunk for each token, and all of them whole at the end."""
    text, params = talker().text, SamplingParams(max_tokens=4)
    reply = Reply(make_request(text, [1, 2, 3], params), params, text.tokenizer)

    def write() -> None:
        for at in range(size):
            reply.take([Token("r", 0, 4, at + 1, None)])
            writer.pieces([reply], [(0, Piece(0, "a", (4,), part=part if part is TEXT else part(at)))])

    return write


@_reads("usage_in_chunks")
def _usage_in_chunks(size: int) -> Work:
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = CompletionFields.model_validate({"prompt": [1], "stream": True, "stream_options": options})
    return _streamed(size // 16, CompletionWriter("m", fields, TokenNames(talker().text.tokenizer), None))


@_reads("items_of_calls")
def _items_of_calls(size: int) -> Work:
    writer = ItemsWriter("m", ResponseFields.model_validate({"input": "a"}))
    return _streamed(size // 64, writer, lambda at: ToolCallPart(at, "id", "f"))


@_reads("blocks_of_calls")
def _blocks_of_calls(size: int) -> Work:
    return _streamed(size // 64, MessagesWriter("m"), lambda at: ToolCallPart(at, "id", "f"))


@_reads("stream_not_read", most=MAX_PENDING_BYTES // 64)
def _stream_not_read(size: int) -> Work:
    """Of no more parts than a stream keeps: a call has several tokens."""

    def fill() -> None:
        stream = Stream("r", lambda _: None)
        for at in range(size):
            stream.put([Piece(0, "a", (1,), part=ToolCallPart(at, "id", "f"))])
        stream.take()

    return fill


# -- bodies ------------------------------------------------------------------------------------------------------------


def _body(value: object, *, is_whole: bool = True) -> Work:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()

    def read() -> None:
        try:
            parse_object(data)
        except ApiError:
            if is_whole:
                raise

    return read


@_reads("body_escapes", most=MAX_BODY_BYTES)
def _body_escapes(size: int) -> Work:
    return _body(b'{"a": "' + b"\\\\\\u00e9" * (size // 8 - 2) + b'"}')


@_reads("body_half_pairs", most=MAX_BODY_BYTES)
def _body_half_pairs(size: int) -> Work:
    return _body(b'{"a": "' + b"\\u00e9" * (size // 6 - 3) + b'\\ud83d"}', is_whole=False)


@_reads("body_numbers", most=MAX_BODY_BYTES)
def _body_numbers(size: int) -> Work:
    return _body({"a": [1] * (size // 3 - 5)})


@_reads("body_one_number", most=MAX_BODY_BYTES)
def _body_one_number(size: int) -> Work:
    return _body(b'{"a": 0.' + b"9" * (size - 20) + b"}")


@_reads("body_whole_number", most=MAX_BODY_BYTES)
def _body_whole_number(size: int) -> Work:
    return _body(b'{"a": ' + b"9" * (size - 20) + b"}", is_whole=False)


@_reads("body_nesting", most=MAX_BODY_BYTES)
def _body_nesting(size: int) -> Work:
    return _body(b"[" * size, is_whole=False)


@_reads("body_lists", most=MAX_BODY_BYTES)
def _body_lists(size: int) -> Work:
    return _body({"a": [[[[["[" * 160]]]]] * (size // 192)})


@_reads("body_keys", most=MAX_BODY_BYTES)
def _body_keys(size: int) -> Work:
    return _body({f"k{at:08}": 1 for at in range(size // 16)})


@_reads("body_open_text", most=MAX_BODY_BYTES)
def _body_open_text(size: int) -> Work:
    return _body(b'{"a":[' * 70 + b'"' * (size - 500), is_whole=False)


def _fields(shape: type[Any], body: dict[str, Any]) -> Work:
    return lambda: parse_fields(shape, body)


@_reads("chat_fields", most=MAX_BODY_BYTES)
def _chat_fields(size: int) -> Work:
    part = {"type": "text", "text": ""}
    return _fields(ChatFields, {"messages": [{"role": "user", "content": [part] * (size // 32)}]})


@_reads("completion_fields", most=MAX_BODY_BYTES)
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


@_reads("response_items", most=MAX_BODY_BYTES)
def _response_items(size: int) -> Work:
    item = {"role": "assistant", "content": "a" * 16}
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    fields = ResponseFields.model_construct(input=[item, call] * (size // 128))
    return lambda: messages_of_items(fields, ImagePolicy(False))


@_reads("message_turns", most=MAX_BODY_BYTES)
def _message_turns(size: int) -> Work:
    blocks = [{"type": "thinking", "thinking": "a"}, {"type": "text", "text": "b"}] * (size // 128)
    results = [{"type": "tool_result", "content": [{"type": "text", "text": "c"}]}] * (size // 128)
    said = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    fields = validated(MessagesFields, {"messages": said, "max_tokens": 1})
    return lambda: messages_of_turns(fields, ImagePolicy(False))


# -- prompts -----------------------------------------------------------------------------------------------------------


@_reads("messages", most=MAX_BODY_BYTES)
def _messages(size: int) -> Work:
    function = {"name": "f", "arguments": json.dumps({"a": ["\\"] * 8})}
    said: list[Any] = [{"role": "system", "content": "a"}] * (size // 64)
    said += [{"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": function}]}] * (size // 128)
    support = TemplateSupport(needs_short_ids=True, has_late_system=False)

    def read() -> None:
        num_text_bytes(said)
        prepare_messages(canonical(said, support), wants_parts=False)

    return read


@_reads("marked_text")
def _marked_text(size: int) -> Work:
    """A template that replaces in what it has replaced."""
    text = mark("a b " * (size // 4), "m0")
    return lambda: text.replace("a", "x").replace(" ", "--").split("x")


@_reads("marked_letters", most=1_000_000)
def _marked_letters(size: int) -> Work:
    text = mark("a b " * (size // 4)).replace("b", "c")
    return lambda: concat(letter for letter in text)


@_reads("template_json", most=MAX_BODY_BYTES)
def _template_json(size: int) -> Work:
    items = mark([{"name": "a", "text": "[" * 40}] * (size // 64), "t0")
    return lambda: to_json(items)


@_reads("char_spans")
def _char_spans(size: int) -> Work:
    spans = tuple((at * 4, at * 4 + 2) for at in range(size // 4))
    sources = tuple((start, stop, f"m{at % 7}") for at, (start, stop) in enumerate(spans))
    rendered = Rendered("a" * size, spans, sources)
    return lambda: char_spans(rendered)


@_reads("control_names", most=400_000)
def _control_names(size: int) -> Work:
    """What clients write that a template would write itself; a text of more is refused by its tokens."""
    piece = "<|im_end|>\n<|im_start|>"
    text = piece * (size // len(piece))
    encoder = ChatTokenizer(byte_level_without_bound(), "<|im_end|><|im_start|>")
    rendered = Rendered(text + "<|im_start|>", ((0, len(text)),))
    return lambda: encoder.encode_parts(rendered, ())


def byte_level_without_bound() -> Tokenizer:
    """A tokenizer that takes any length."""
    return Tokenizer(byte_level().library, 1 << 30)


@_reads("one_word", most=MAX_BODY_BYTES)
def _one_word(size: int) -> Work:
    tokenizer = Tokenizer.from_files(smollm2_directory() / "tokenizer.json", 1 << 30)
    return lambda: tokenizer.encode("abcdefgh" * (size // 8), add_special_tokens=False)


@_reads("stable_prefix", most=MAX_BODY_BYTES)
def _stable_prefix(size: int) -> Work:
    """Lines that nearly are dates, times and ids."""
    line = "1-" * 60 + "a" * 60 + ":1" * 60
    listed = StablePrefix(["dates", "times", "ids", "a*b*"])
    messages = [{"role": "system", "content": "\n".join([line[at:] for at in range(100)] * 5)}] * (size // 100_000 + 2)
    return lambda: [listed.remove_lines([one]) for one in messages]


@_reads("fold")
def _fold(size: int) -> Work:
    line = "1-a" * 170
    return lambda: [fold(line) for _ in range(size // 510)]


@_reads("prefix_guard", most=1 << 18)
def _prefix_guard(size: int) -> Work:
    """Prompts that differ at every few tokens."""
    ours = packed([at % 50 for at in range(size // 4)])
    theirs = packed([at % 50 if at % 40 else 99 for at in range(size // 4)])
    return lambda: gaps_between(ours, theirs, 0)


# -- grammars ----------------------------------------------------------------------------------------------------------


def _grammar(make: Work) -> Work:
    def read() -> None:
        with suppress(QuireError):
            make()

    return read


@_reads("gbnf", most=MAX_TEXT_BYTES)
def _gbnf(size: int) -> Work:
    return _grammar(lambda: Grammar.gbnf("root ::= " + '"a" | ' * (size // 6 - 10) + '"b"'))


@_reads("gbnf_backslashes", most=MAX_TEXT_BYTES)
def _gbnf_backslashes(size: int) -> Work:
    return _grammar(lambda: Grammar.gbnf('root ::= "' + "\\\\" * (size // 2 - 20) + '"'))


@_reads("lark_brackets", most=MAX_TEXT_BYTES)
def _lark_brackets(size: int) -> Work:
    return _grammar(lambda: Grammar.lark("start: " + "(" * (size // 2 - 10) + ")" * (size // 2 - 10)))


@_reads("regex_text", most=MAX_TEXT_BYTES)
def _regex_text(size: int) -> Work:
    return _grammar(lambda: Grammar.regex("(a|" * (size // 4) + ")" * (size // 4)))


@_reads("choice", most=MAX_TEXT_BYTES)
def _choice(size: int) -> Work:
    return _grammar(lambda: Grammar.choice([f"c{at:06}" for at in range(size // 12)]))


@_reads("schema_bounds", most=MAX_BODY_BYTES)
def _schema_bounds(size: int) -> Work:
    schema: Any = {"type": "array", "items": [{"type": "integer"}, {"enum": [1, 2]}] * (size // 64)}
    return lambda: bounded_schema(schema, "s")


@_reads("tool_grammar", most=MAX_TEXT_BYTES)
def _tool_grammar(size: int) -> Work:
    properties = {f"p{at}": {"type": "string", "enum": ["a" * 16]} for at in range(8)}
    schema = Tool("t", "", {"type": "object", "properties": properties}).schema
    tools = [CallableTool(f"t{at}", schema) for at in range(size // 256)]
    marks = {f"<mark{at}>": at for at in range(500)}
    rules = AnswerRules(calls=ToolRules(TAGGED, tools), reasoning=THOUGHTS)
    return lambda: answer_grammar(rules, marks)


# -- streams of servers ------------------------------------------------------------------------------------------------


def _fed(chunks: Sequence[bytes]) -> Work:
    def read() -> None:
        reader = SseReader(4_000_000)
        for chunk in chunks:
            reader.feed(chunk)

    return read


@_reads("stream_line", most=4_000_000)
def _stream_line(size: int) -> Work:
    return _fed([b"data"] * (size // 4))


@_reads("stream_events")
def _stream_events(size: int) -> Work:
    return _fed([b"data: a\n\n" * 4096] * (size // 36_864 + 1))


@_reads("watched_lines", most=4_000_000)
def _watched_lines(size: int) -> Work:
    return _fed([b"event: snapshot\n", *[b"data: a\n"] * (size // 8), b"\n"])


def _member(chunks: Sequence[bytes]) -> Work:
    """What a member of another project streams, up to its first lie."""

    def read() -> None:
        stream = OpenAIStream((1, 2, 3), 49_152, None, 1 << 22)
        with suppress(QuireError):
            for chunk in chunks:
                stream.feed(chunk)

    return read


@_reads("member_tokens")
def _member_tokens(size: int) -> Work:
    line = b'data: {"choices":[{"index":0,"token_ids":[1]}]}\n\n'
    return _member([line] * (size // len(line)))


@_reads("member_line", most=MAX_LINE_BYTES)
def _member_line(size: int) -> Work:
    """One line that comes in small pieces and does not end."""
    return _member([b"data: ", *[b"[[[["] * (size // 4 - 4)])


@_reads("member_list", most=MAX_LINE_BYTES)
def _member_list(size: int) -> Work:
    ids = b",".join([b"1"] * (size // 2 - 40))
    return _member([b'data: {"choices":[{"index":0,"token_ids":[' + ids + b"]}]}\n\n"])
