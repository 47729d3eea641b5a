"""Answers with reasoning, text and tool calls in every known format, cut at any token: the events that each API dialect
streams, joined as its clients join them, equal the answer that this dialect gives without streaming.

No model runs: a token is a letter of a small tokenizer. Tokens come in groups, as forced and drafted tokens do.
"""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from benchmarks.record import say
from proofs.agents.joined import CHAT, JOINS, MESSAGES, RESPONSES, events_of
from proofs.framework.proof import Proof, section
from quire.api.dialects.anthropic.writer import MessagesWriter
from quire.api.dialects.openai.chat import ChatWriter
from quire.api.dialects.openai.response_writer import ItemsWriter
from quire.api.dialects.openai.schemas import ChatFields, ResponseFields
from quire.client.reply.outputs import merge_pieces
from quire.client.reply.reply import Reply
from quire.client.request.params import SamplingParams
from quire.client.request.requests import make_request
from quire.core.events import Finished, RequestEvent, SequenceFinished, Token
from quire.core.request import FinishReason
from quire.text.parsers.reader import AnswerFormat
from quire.text.parsers.tool_format import ReasoningFormat
from tests.support.servers.talkers import talker
from tests.support.servers.tool_formats import FORMATS, Call, written

THOUGHTS = ReasoningFormat("<think>", "</think>")
LETTERS = 'ab {}[]"\\,:\n</tool_call>='


def random_text(random: Random, letters: str = LETTERS) -> str:
    """A short text of letters that have a meaning in some format."""
    return "".join(random.choice(letters) for _ in range(random.randrange(12)))


def random_value(random: Random, depth: int = 0) -> Any:
    """A random JSON value."""
    kind = random.randrange(4 if depth > 1 else 6)
    if kind < 2:
        return random_text(random)
    if kind < 4:
        return random.choice([None, True, 7, -1.5])
    if kind == 4:
        return [random_value(random, depth + 1) for _ in range(random.randrange(3))]
    return {random_text(random): random_value(random, depth + 1) for _ in range(random.randrange(3))}


def random_answer(random: Random) -> tuple[AnswerFormat, str]:
    """A format, and a random answer in it."""
    fmt = FORMATS[random.choice([*FORMATS])]
    plain = "ab ,:\n"
    thought, text = random_text(random, plain).strip(), random_text(random, plain).strip()
    names = random.sample(["get", "put", "mcp__a-b"], 1 if fmt.call_separator is None else random.randrange(1, 4))
    calls = [
        Call(name, {key: random_value(random) for key in ("a", "some_key")[: random.randrange(3)]}) for name in names
    ]
    if fmt.tagged is not None:
        calls = [Call(call.name, {key: _clean(value) for key, value in call.arguments.items()}) for call in calls]
    keys = {call.name: frozenset(key for key, arg in call.arguments.items() if isinstance(arg, str)) for call in calls}
    answer = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    answer += text + "\n" if text and fmt.marker else ""
    answer += written(fmt, calls) if random.random() < 0.8 else ""
    return AnswerFormat(reasoning=THOUGHTS, tools=fmt, text_keys=keys), answer


def _clean(value: Any) -> Any:  # tagged formats cannot quote a "<"
    return value.replace("<", "(") if isinstance(value, str) else value


@section("streams")
def streams(proof: Proof) -> None:
    """Compare the joined stream of each answer with the whole answer, in all dialects."""
    text = talker().text
    writers = dialects()
    count, num_unequal = proof.sized(quick=300, full=3_000), 0
    for number in range(count):
        answer_format, answer = random_answer(proof.random)
        ids = text.tokenizer.encode(answer, add_special_tokens=False) if answer else []
        params = SamplingParams(answer_format=answer_format)
        reason = proof.random.choice([FinishReason.STOP, FinishReason.LENGTH])
        for name, make_writer in writers.items():
            join_events, read_whole = JOINS[name]
            request = make_request(text, [1, 2, 3], params)
            events = _events(request.request_id, ids, reason)
            reply, writer = Reply(request, params, text.tokenizer), make_writer()
            streamed_events = _stream_events(reply, writer, events, proof.random)
            whole_reply = Reply(request, params, text.tokenizer)
            whole_reply.take(events)
            if join_events(streamed_events) != read_whole(json.loads(make_writer().whole([whole_reply]))):
                num_unequal += 1
                say(f"    {name}, answer {number}: {answer!r}")
    proof.report("stream_answers", count, f"in {len(writers)} dialects and {len(FORMATS)} formats")
    proof.equals("stream_unequal", num_unequal, 0, "joined streams that differ from the whole answer")


def _events(request_id: str, ids: Sequence[int], reason: FinishReason) -> list[RequestEvent]:
    tokens: list[RequestEvent] = [Token(request_id, 0, token_id, index + 1, None) for index, token_id in enumerate(ids)]
    return [*tokens, SequenceFinished(request_id, 0, reason, len(ids), None), Finished(request_id, 3, 0, len(ids))]


def _stream_events(reply: Reply, writer: Any, events: Sequence[RequestEvent], random: Random) -> list[dict[str, Any]]:
    """The events of a stream whose tokens come in groups of random size, with pieces merged at random."""
    data, position = b"", 0
    has_begun = False
    while position < len(events):
        size = random.choice([1, 1, 2, 5, 50])
        pieces = reply.take(events[position : position + size])
        position += size
        batch = [(0, piece) for piece in (merge_pieces(pieces) if random.random() < 0.5 else pieces)]
        if batch:
            encoded = writer.pieces([reply], batch)
            data += (b"" if has_begun or not encoded else writer.begin([reply])) + encoded
            has_begun = has_begun or bool(encoded)
    data = data if has_begun else writer.begin([reply])
    data += writer.end([reply])
    return events_of(data)


def dialects() -> dict[str, Callable[[], Any]]:
    """Dialect name -> a function that makes its response writer."""
    chat_fields = ChatFields.model_validate({"messages": [{"role": "user", "content": "x"}]})
    response_fields = ResponseFields.model_validate({"input": "x"})
    return {
        CHAT: lambda: ChatWriter("m", chat_fields, "default"),
        RESPONSES: lambda: ItemsWriter("m", response_fields),
        MESSAGES: lambda: MessagesWriter("m"),
    }
