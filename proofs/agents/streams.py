"""Answers with thoughts, text and calls in every known format, cut anywhere: what each dialect streams, joined as its
clients join it, is what the same dialect says at once.

No model runs: tokens are letters of a small tokenizer, and come in groups of any size, as forced and guessed tokens do.
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
from quire.api.dialects.openai.logprobs import TokenNames
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
from quire.text.tokenizer import Tokenizer
from tests.support.servers.talkers import talker
from tests.support.servers.tool_formats import FORMATS, Call, written

THOUGHTS = ReasoningFormat("<think>", "</think>")
LETTERS = 'ab {}[]"\\,:\n</tool_call>='


def random_text(random: Random, letters: str = LETTERS) -> str:
    """Short, of letters that matter somewhere."""
    return "".join(random.choice(letters) for _ in range(random.randrange(12)))


def random_value(random: Random, depth: int = 0) -> Any:
    """Something that JSON can say."""
    kind = random.randrange(4 if depth > 1 else 6)
    if kind < 2:
        return random_text(random)
    if kind < 4:
        return random.choice([None, True, 7, -1.5])
    if kind == 4:
        return [random_value(random, depth + 1) for _ in range(random.randrange(3))]
    return {random_text(random): random_value(random, depth + 1) for _ in range(random.randrange(3))}


def random_answer(random: Random) -> tuple[AnswerFormat, str]:
    """An answer, and the format that it is in."""
    form = FORMATS[random.choice([*FORMATS])]
    plain = "ab ,:\n"
    thought, text = random_text(random, plain).strip(), random_text(random, plain).strip()
    names = random.sample(["get", "put", "mcp__a-b"], 1 if form.call_separator is None else random.randrange(1, 4))
    calls = [
        Call(name, {key: random_value(random) for key in ("a", "some_key")[: random.randrange(3)]}) for name in names
    ]
    if form.tagged is not None:
        calls = [Call(one.name, {key: _tame(value) for key, value in one.arguments.items()}) for one in calls]
    keys = {one.name: frozenset(key for key, value in one.arguments.items() if isinstance(value, str)) for one in calls}
    answer = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    answer += text + "\n" if text and form.marker else ""
    answer += written(form, calls) if random.random() < 0.8 else ""
    return AnswerFormat(reasoning=THOUGHTS, tools=form, text_keys=keys), answer


def _tame(value: Any) -> Any:
    return value.replace("<", "(") if isinstance(value, str) else value


@section("streams")
def streams(proof: Proof) -> None:
    """Each answer once, in all dialects."""
    text = talker().text
    spoken = dialects(text.tokenizer)
    count, wrong = proof.sized(quick=300, full=3_000), 0
    for at in range(count):
        form, answer = random_answer(proof.random)
        ids = text.tokenizer.encode(answer, add_special_tokens=False) if answer else []
        params = SamplingParams(answer_format=form)
        reason = proof.random.choice([FinishReason.STOP, FinishReason.LENGTH])
        for name, make in spoken.items():
            join, whole = JOINS[name]
            request = make_request(text, [1, 2, 3], params)
            events = _events(request.request_id, ids, reason)
            reply, writer = Reply(request, params, text.tokenizer), make()
            told = _streamed(reply, writer, events, proof.random)
            other = Reply(request, params, text.tokenizer)
            other.take(events)
            if join(told) != whole(json.loads(make().whole([other]))):
                wrong += 1
                say(f"    {name}, answer {at}: {answer!r}")
    proof.report("stream_answers", count, f"in {len(spoken)} dialects and {len(FORMATS)} formats")
    proof.equals("stream_unequal", wrong, 0, "joined differs from whole")


def _events(request_id: str, ids: Sequence[int], reason: FinishReason) -> list[RequestEvent]:
    tokens: list[RequestEvent] = [Token(request_id, 0, token_id, at + 1, None) for at, token_id in enumerate(ids)]
    return [*tokens, SequenceFinished(request_id, 0, reason, len(ids), None), Finished(request_id, 3, 0, len(ids))]


def _streamed(reply: Reply, writer: Any, events: Sequence[RequestEvent], random: Random) -> list[dict[str, Any]]:
    """What goes over the wire, event by event, when tokens come in groups and pieces are joined or not."""
    data, place = b"", 0
    begun = False
    while place < len(events):
        size = random.choice([1, 1, 2, 5, 50])
        pieces = reply.take(events[place : place + size])
        place += size
        batch = [(0, piece) for piece in (merge_pieces(pieces) if random.random() < 0.5 else pieces)]
        if batch:
            added = writer.pieces([reply], batch)
            data += (b"" if begun or not added else writer.begin([reply])) + added
            begun = begun or bool(added)
    data = data if begun else writer.begin([reply])
    data += writer.end([reply])
    return events_of(data)


def dialects(tokenizer: Tokenizer) -> dict[str, Callable[[], Any]]:
    """Who writes in each."""
    fields = ChatFields.model_validate({"messages": [{"role": "user", "content": "x"}]})
    asked, names = ResponseFields.model_validate({"input": "x"}), TokenNames(tokenizer, False)
    return {
        CHAT: lambda: ChatWriter("m", fields, names, "default"),
        RESPONSES: lambda: ItemsWriter("m", asked),
        MESSAGES: lambda: MessagesWriter("m"),
    }
