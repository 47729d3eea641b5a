"""Cases with the official Python SDKs: each compares a whole answer with a streamed one, or expects a refusal.

    python sdk_cases.py < job      runs in an environment with `openai` and `anthropic`, and imports nothing of quire

`job` is one JSON object: `url`, `model`, `seed`, `kinds` (a key of `KINDS`), `count` (the least number of calls),
`num_cases` (the least number of cases), `key`, and `limited`: two keys with a limit of one request per minute. The last
line on stdout is a JSON object with `num_calls`, `num_stops`, `num_refused`, `kinds`, `versions` and `wrong`.
"""

import itertools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from random import Random
from typing import Any, Literal, cast

from pydantic import BaseModel

anthropic: Any = import_module("anthropic")
openai: Any = import_module("openai")
WORDS = ("river", "stone", "light", "winter", "garden", "letter", "morning", "engine", "harbour", "orange", "window")
TOO_LONG = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")


class Place(BaseModel):
    """A place."""

    city: Literal["Bonn", "Rome", "Oslo"]
    size: Literal[1, 2, 3]


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bonn", "Rome", "Oslo"]}, "size": {"enum": [1, 2, 3]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
CHAT_TOOLS = [{"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": SCHEMA}}]
RESPONSE_TOOLS = [{"type": "function", "name": "find", "description": "Finds.", "parameters": SCHEMA, "strict": True}]
MESSAGE_TOOLS = [{"name": "find", "description": "Finds.", "input_schema": SCHEMA}]


class Cases:
    """Sends requests, counts them and collects failures."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.url, self.model, self.key = job["url"], job["model"], job["key"]
        self.limited: list[str] = job["limited"]
        self.random = Random(job["seed"])
        self.openai, self.anthropic = self.openai_client(self.key), self.anthropic_client(self.key)
        self.num_calls = self.num_stops = self.num_refused = 0
        self.kinds: Counter[str] = Counter()
        self.wrong: list[str] = []

    def openai_client(self, key: str) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def anthropic_client(self, key: str) -> Any:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0)

    def run(self, kinds: tuple[Callable[["Cases"], None], ...], count: int, num_cases: int) -> None:
        """Run these kinds of cases in turn, until there are enough calls and cases."""
        for index, case in enumerate(itertools.cycle(kinds)):
            if self.num_calls >= count and index >= num_cases:
                return
            self.kinds[case.__name__] += 1
            try:
                case(self)
            except Exception as error:  # a user of the SDK would get it too
                self.wrong.append(f"python, {case.__name__}: {error!r}"[:600])

    # -- requests ------------------------------------------------------------------------------------------------------

    def question(self) -> str:
        return f"Tell me of the {' and the '.join(self.random.choices(WORDS, k=3))}."

    def turn(self, text: str | None = None) -> list[Any]:
        return [{"role": "user", "content": text or self.question()}]

    def body(self, **more: Any) -> dict[str, Any]:
        """The fields of every body. `temperature` is an extra field because one SDK has no argument for it."""
        return {"model": self.model, "extra_body": {"temperature": 0}, **more}

    def call(self, ask: Callable[..., Any], **body: Any) -> Any:
        self.num_calls += 1
        return ask(**body)

    def refusal(self, kind: Any, ask: Callable[..., Any], **body: Any) -> Any:
        """Call `ask`, which must raise an error of this kind; returns the error."""
        try:
            self.call(ask, **body)
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            names = (kind.__name__, "ThreadNotFoundError")
            check(isinstance(error, kind) and type(error).__name__ in names, error)
            check("retry-after" in error.response.headers or error.status_code not in (429, 503), error)
            self.num_refused += 1
            return error
        raise AssertionError(f"expected {kind.__name__}, got an answer")


def check(condition: bool, details: Any) -> None:
    """Fail the case, with these details, if the condition is false."""
    if not condition:
        raise AssertionError(f"{details}")


def check_equal(actual: Any, expected: Any) -> None:
    """Fail the case if the values differ."""
    check(actual == expected, f"expected {expected}, got {actual}")


# -- chats -------------------------------------------------------------------------------------------------------------


def chat_parts(completion: Any) -> Any:
    """The parts of an answer that must be equal, whole and streamed."""
    (choice,) = completion.choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.message.content or "", calls, choice.finish_reason


def chat_streamed(cases: Cases, body: dict[str, Any]) -> Any:
    """Stream with the SDK's helper, and compare its answer with the joined deltas."""
    text = ""
    cases.num_calls += 1
    try:
        with cases.openai.chat.completions.stream(**body) as stream:
            for event in stream:
                text += event.delta if event.type == "content.delta" else ""
            final = stream.get_final_completion()
    except openai.LengthFinishReasonError as error:  # this helper raises for an answer that was cut
        final = error.completion
        check_equal(final.choices[0].finish_reason, "length")
    check_equal(text, final.choices[0].message.content or "")
    return final


def chat_plain(cases: Cases) -> None:
    """A chat with a seed and a temperature: whole, by the helper, and by chunks."""
    params = {"temperature": cases.random.choice((0, 0.8)), "seed": cases.random.randrange(99), "max_tokens": 24}
    body = {"model": cases.model, "messages": cases.turn(), **params}
    whole = cases.call(cases.openai.chat.completions.create, **body)
    check_equal(chat_parts(chat_streamed(cases, body)), chat_parts(whole))
    text, usage = "", None
    options = {"include_usage": True}
    for chunk in cases.call(cases.openai.chat.completions.create, **body, stream=True, stream_options=options):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    check_equal(text, whole.choices[0].message.content)
    check_equal(usage and usage.completion_tokens, whole.usage.completion_tokens)


def chat_tools(cases: Cases) -> None:
    """A tool call, then its result."""
    by_name = {"type": "function", "function": {"name": "find"}}
    body = cases.body(messages=cases.turn(), tools=CHAT_TOOLS, tool_choice=cases.random.choice(("required", by_name)))
    body |= {"max_tokens": 60, "parallel_tool_calls": False}
    whole = cases.call(cases.openai.chat.completions.create, **body)
    check_equal(chat_parts(chat_streamed(cases, body)), chat_parts(whole))
    check_equal(whole.choices[0].finish_reason, "tool_calls")
    message = whole.choices[0].message
    (call,) = message.tool_calls
    Place.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "found"}
    history = [*body["messages"], message, result]
    second = cases.call(cases.openai.chat.completions.create, **{**body, "messages": history, "tool_choice": "auto"})
    check(second.usage.prompt_tokens > whole.usage.prompt_tokens, second.usage)


def chat_parse(cases: Cases) -> None:
    """Parse an answer to a class, whole and streamed; and the arguments of a call."""
    body = cases.body(messages=cases.turn(), max_tokens=60)
    whole = cases.call(cases.openai.chat.completions.parse, **body, response_format=Place)
    parsed = whole.choices[0].message.parsed
    check(isinstance(parsed, Place), whole)
    check_equal(chat_streamed(cases, {**body, "response_format": Place}).choices[0].message.parsed, parsed)
    tools = [openai.pydantic_function_tool(Place, name="find")]
    called = cases.call(
        cases.openai.chat.completions.parse, **body, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    check(isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Place), called)


# -- responses ---------------------------------------------------------------------------------------------------------


def response_parts(response: Any) -> Any:
    """The parts of an answer that must be equal, whole and streamed."""
    items = [(item.type, getattr(item, "name", None), getattr(item, "arguments", None)) for item in response.output]
    return items, response.output_text, response.status, response.usage.output_tokens


def response_streamed(cases: Cases, body: dict[str, Any]) -> Any:
    """Stream with the SDK's helper, and compare its last event with the joined deltas."""
    text, last_event = "", cast("Any", None)
    cases.num_calls += 1
    with cases.openai.responses.stream(**body) as stream:
        for event in stream:
            text += event.delta if event.type == "response.output_text.delta" else ""
            last_event = event
        if last_event.type == "response.completed":
            check_equal(response_parts(stream.get_final_response()), response_parts(last_event.response))
    check(last_event is not None and last_event.type in ("response.completed", "response.incomplete"), last_event)
    check_equal(text, last_event.response.output_text)
    return last_event.response


def response_plain(cases: Cases) -> None:
    """A response, whole and streamed, which is continued by its id, retrieved and deleted."""
    body = cases.body(input=cases.question(), max_output_tokens=24, instructions="Be brief.")
    whole = cases.call(cases.openai.responses.create, **body)
    check_equal(response_parts(response_streamed(cases, body)), response_parts(whole))
    question = cases.question()
    by_id = cases.call(cases.openai.responses.create, **{**body, "input": question}, previous_response_id=whole.id)
    history = [*cases.turn(body["input"]), *whole.output, *cases.turn(question)]
    by_history = cases.call(cases.openai.responses.create, **{**body, "input": history}, store=False)
    check_equal(response_parts(by_id), response_parts(by_history))
    check_equal(cases.call(lambda: cases.openai.responses.retrieve(whole.id)).output, whole.output)
    cases.call(lambda: cases.openai.responses.delete(whole.id))
    cases.refusal(openai.NotFoundError, lambda: cases.openai.responses.retrieve(whole.id))


def response_tools(cases: Cases) -> None:
    """A tool call, then its result."""
    body = cases.body(input=cases.turn(), tools=RESPONSE_TOOLS, tool_choice="required", max_output_tokens=60)
    body["parallel_tool_calls"] = False
    whole = cases.call(cases.openai.responses.create, **body)
    check_equal(response_parts(response_streamed(cases, body)), response_parts(whole))
    (call,) = [item for item in whole.output if item.type == "function_call"]
    Place.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
    history = [*body["input"], *whole.output, result]
    second = cases.call(cases.openai.responses.create, **{**body, "input": history, "tool_choice": "auto"})
    check(second.usage.input_tokens > whole.usage.input_tokens, second.usage)


def response_parse(cases: Cases) -> None:
    """Parse an answer to a class."""
    body = cases.body(input=cases.question(), max_output_tokens=60, text_format=Place)
    parsed = cases.call(cases.openai.responses.parse, **body).output_parsed
    check(isinstance(parsed, Place), parsed)
    cases.num_calls += 1
    with cases.openai.responses.stream(**body) as stream:
        check_equal(stream.get_final_response().output_parsed, parsed)


# -- messages ----------------------------------------------------------------------------------------------------------


def message_parts(message: Any) -> Any:
    """The parts of an answer that must be equal, whole and streamed."""
    blocks = [(block.type, getattr(block, "text", None), getattr(block, "input", None)) for block in message.content]
    return blocks, message.stop_reason, message.usage.output_tokens


def message_streamed(cases: Cases, body: dict[str, Any]) -> Any:
    """Stream with the SDK's helper, and compare its message with the joined text."""
    cases.num_calls += 1
    with cases.anthropic.messages.stream(**body) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    check_equal(text, "".join(block.text for block in final.content if block.type == "text"))
    return final


def message_plain(cases: Cases) -> None:
    """A message, whole and streamed, and the number of its prompt tokens."""
    fields: dict[str, Any] = {"model": cases.model, "messages": cases.turn(), "system": "Be brief."}
    body = {**cases.body(**fields), "max_tokens": 24}
    whole = cases.call(cases.anthropic.messages.create, **body)
    check_equal(message_parts(message_streamed(cases, body)), message_parts(whole))
    num_tokens, usage = cases.call(cases.anthropic.messages.count_tokens, **fields).input_tokens, whole.usage
    written, cached = usage.cache_creation_input_tokens or 0, usage.cache_read_input_tokens or 0
    check_equal(num_tokens, usage.input_tokens + written + cached)


def message_tools(cases: Cases) -> None:
    """A tool call, then its result."""
    choice = cases.random.choice(({"type": "any"}, {"type": "tool", "name": "find"}))
    body = cases.body(messages=cases.turn(), tools=MESSAGE_TOOLS, max_tokens=60)
    body["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    whole = cases.call(cases.anthropic.messages.create, **body)
    check_equal(message_parts(message_streamed(cases, body)), message_parts(whole))
    check_equal(whole.stop_reason, "tool_use")
    (call,) = [block for block in whole.content if block.type == "tool_use"]
    Place.model_validate(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "found"}
    new_messages = [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    body |= {"messages": [*body["messages"], *new_messages], "tool_choice": {"type": "auto"}}
    second = cases.call(cases.anthropic.messages.create, **body)
    check(second.usage.output_tokens > 0, second)


def message_parse(cases: Cases) -> None:
    """Parse an answer to a class."""
    body: dict[str, Any] = {"model": cases.model, "messages": cases.turn(), "max_tokens": 60}
    parsed = cases.call(cases.anthropic.messages.parse, **body, output_format=Place).parsed_output
    check(isinstance(parsed, Place), parsed)


def message_thread(cases: Cases) -> None:
    """A stored conversation, compared with one of the full history; and a tool that the SDK runs by itself."""
    first, second = cases.turn()[0], cases.turn()[0]
    fields = cases.body(max_tokens=20)
    thread = cases.anthropic.beta.messages.thread(**fields, system="Be brief.")
    first_answer, second_answer = cases.call(lambda: thread.send(first)), cases.call(lambda: thread.send(second))
    check(thread.previous_message_id is not None, "the thread was not stored")
    history = [first, {"role": "assistant", "content": first_answer.content}, second]
    whole = cases.call(cases.anthropic.messages.create, **fields, system="Be brief.", messages=history)
    check_equal(message_parts(second_answer), message_parts(whole))
    cities: list[str] = []

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def find(city: Literal["Bonn", "Oslo"]) -> str:
        """Finds a city."""
        cities.append(city)
        return "found"

    choice = {"type": "any", "disable_parallel_tool_use": True}
    body = {**fields, "max_tokens": 200, "tools": [find], "tool_choice": choice, "messages": cases.turn()}
    cases.num_calls += 2
    messages = [*cases.anthropic.beta.messages.tool_runner(**body, max_iterations=2)]
    check_equal(len(messages), 2)
    check(bool(cities), "the tool was not run")


# -- refusals ----------------------------------------------------------------------------------------------------------


def openai_refusals(cases: Cases) -> None:
    """Mistakes in requests to the OpenAI APIs, each with its own class of error."""
    chat, responses = cases.openai.chat.completions.create, cases.openai.responses.create
    body: dict[str, Any] = {"model": cases.model, "messages": cases.turn(), "max_tokens": 2}
    check_equal(cases.refusal(openai.NotFoundError, chat, **{**body, "model": "nobody"}).code, "model_not_found")
    bad_value = cases.refusal(openai.BadRequestError, chat, **{**body, "temperature": -1})
    check_equal((bad_value.code, bad_value.param), ("invalid_parameter", "temperature"))
    too_long = cases.refusal(openai.BadRequestError, responses, model=cases.model, input="x " * 1900)
    check_equal(too_long.code, "context_length_exceeded")
    tool = {"type": "function", "function": {"name": "no way"}}
    check_equal(cases.refusal(openai.BadRequestError, chat, **body, tools=[tool]).param, "tools")
    unknown_id = {"model": cases.model, "input": "x", "previous_response_id": "resp_none"}
    check_equal(cases.refusal(openai.BadRequestError, responses, **unknown_id).code, "previous_response_not_found")
    cases.refusal(openai.AuthenticationError, cases.openai_client("wrong").responses.create, model="x", input="x")


def anthropic_refusals(cases: Cases) -> None:
    """Mistakes in requests to the Anthropic API, each with its own class of error."""
    ask = cases.anthropic.messages.create
    body: dict[str, Any] = {"model": cases.model, "messages": cases.turn(), "max_tokens": 2}
    check_equal(cases.refusal(anthropic.NotFoundError, ask, **{**body, "model": "nobody"}).type, "not_found_error")
    bad_value = cases.refusal(anthropic.BadRequestError, ask, **body, extra_body={"temperature": -1})
    check_equal(bad_value.type, "invalid_request_error")
    too_long = cases.refusal(anthropic.BadRequestError, ask, **{**body, "messages": cases.turn("x " * 1900)})
    match = TOO_LONG.fullmatch(too_long.body["error"]["message"])
    check(match is not None and int(match[1]) > int(match[2]), too_long.body)
    thread = {"thread": {"type": "continue", "previous_message_id": "msg_none"}}
    check_equal(cases.refusal(anthropic.NotFoundError, ask, **body, extra_body=thread).error_code, "thread_not_found")
    stranger = cases.anthropic_client("wrong").messages
    check_equal(cases.refusal(anthropic.AuthenticationError, stranger.create, **body).type, "authentication_error")
    cases.refusal(anthropic.AuthenticationError, stranger.count_tokens, model=cases.model, messages=cases.turn())


def rate_limits(cases: Cases) -> None:
    """Keys with a limit of one request per minute: the second request gets 429 with `retry-after`."""
    if not cases.limited:
        return
    first, second = cases.limited
    cases.limited = []
    body: dict[str, Any] = {"model": cases.model, "messages": cases.turn()}
    chat = cases.openai_client(first).chat.completions.create
    cases.call(chat, **body, max_tokens=1)
    cases.refusal(openai.RateLimitError, chat, **body, max_tokens=1)
    messages = cases.anthropic_client(second).messages
    cases.call(messages.create, **body, max_tokens=1)
    check_equal(cases.refusal(anthropic.RateLimitError, messages.count_tokens, **body).type, "rate_limit_error")


def models(cases: Cases) -> None:
    """List and retrieve models, with both SDKs."""
    for client in (cases.openai, cases.anthropic):
        names = [model.id for model in cases.call(client.models.list).data]
        check_equal(names, [cases.model])
        check_equal(cases.call(lambda client=client: client.models.retrieve(cases.model)).id, cases.model)


# -- several answers, cut by a stop ------------------------------------------------------------------------------------

Choices = list[tuple[str, str]]
"""Texts and finish reasons."""


def chat_choices(cases: Cases, body: dict[str, Any]) -> Choices:
    """Whole answers, with log-probabilities of every token."""
    whole = cases.call(cases.openai.chat.completions.create, **body, logprobs=True, top_logprobs=2)
    rows = [row for choice in whole.choices for row in (choice.logprobs and choice.logprobs.content) or ()]
    check(all(row.logprob <= 0 and len(row.top_logprobs) == 2 for row in rows), rows[:2])
    check_equal(len(rows), whole.usage.completion_tokens)
    return [(choice.message.content or "", str(choice.finish_reason)) for choice in whole.choices]


def chat_chunks(cases: Cases, body: dict[str, Any]) -> Choices:
    """Streamed answers, with log-probabilities of every token."""
    texts, reasons, num_rows, usage = [""] * body["n"], [""] * body["n"], 0, cast("Any", None)
    options = {"logprobs": True, "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True}}
    for chunk in cases.call(cases.openai.chat.completions.create, **body, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            num_rows += len((choice.logprobs and choice.logprobs.content) or ())
        usage = chunk.usage
    check_equal(usage.completion_tokens, num_rows)
    return list(zip(texts, reasons, strict=True))


def completion_choices(cases: Cases, body: dict[str, Any]) -> Choices:
    """Whole answers, with log-probabilities of every token."""
    whole = cases.call(cases.openai.completions.create, **body, logprobs=1)
    num_rows = [len((choice.logprobs and choice.logprobs.token_logprobs) or ()) for choice in whole.choices]
    check_equal(sum(num_rows), whole.usage.completion_tokens)
    return [(choice.text, choice.finish_reason) for choice in whole.choices]


def completion_chunks(cases: Cases, body: dict[str, Any]) -> Choices:
    """Streamed answers, with log-probabilities of every token."""
    texts, reasons = [""] * body["n"], [""] * body["n"]
    for chunk in cases.call(cases.openai.completions.create, **body, logprobs=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    return list(zip(texts, reasons, strict=True))


def chat_stops(cases: Cases) -> None:
    """Chats with a stop string."""
    check_stop(cases, chat_choices, chat_chunks, {"messages": cases.turn()})


def completion_stops(cases: Cases) -> None:
    """Completions with a stop string."""
    check_stop(cases, completion_choices, completion_chunks, {"prompt": cases.question()})


Ask = Callable[[Cases, dict[str, Any]], Choices]


def check_stop(cases: Cases, ask_whole: Ask, ask_streamed: Ask, body: dict[str, Any]) -> None:
    """Ask whole, again, and streamed; then with a stop string from the middle of the answer, so that it must come."""
    random = cases.random
    body |= {"model": cases.model, "max_tokens": random.randint(8, 40), "seed": random.randrange(999)}
    body["n"] = random.choice([1, 1, 2, 3])
    uncut = ask_whole(cases, body)
    check_equal([ask_whole(cases, body), ask_streamed(cases, body), len(uncut)], [uncut, uncut, body["n"]])
    text = uncut[0][0]
    positions = [i for i in range(1, len(text) - 2) if text[i : i + 2].isascii() and text[i : i + 2].isprintable()]
    if not positions:
        return
    cases.num_stops += 1
    position = random.choice(positions)
    stop = text[position : position + 2]
    body["stop"] = random.choice([stop, [stop], ["\x01\x02", stop]])
    cut = ask_whole(cases, body)
    check_equal(ask_streamed(cases, body), cut)
    for (text, _), (cut_text, reason) in zip(uncut, cut, strict=True):
        check(stop not in cut_text, (body, cut_text))
        if stop in text:
            check_equal((cut_text, reason), (text.partition(stop)[0], "stop"))


def completion_mistakes(cases: Cases) -> None:
    """A random mistake in a completion request."""
    body: dict[str, Any] = {"model": cases.model, "prompt": "x"}
    mistakes = (
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found"),
        ({"n": 9}, openai.BadRequestError, "invalid_parameter"),
        ({"prompt": "x " * 1900}, openai.BadRequestError, "context_length_exceeded"),
        ({"temperature": -1}, openai.BadRequestError, "invalid_parameter"),
    )
    mistake, kind, code = cases.random.choice(mistakes)
    check_equal(cases.refusal(kind, cases.openai.completions.create, **{**body, **mistake}).code, code)


def overloaded(cases: Cases) -> None:
    """A second request at a server with room for one; a wrong key; a key with a limit of one request per minute."""
    body: dict[str, Any] = {"model": cases.model, "prompt": "x", "max_tokens": 1}
    create, limited_create = cases.openai.completions.create, cases.openai_client(cases.limited[0]).completions.create
    with create(model=cases.model, prompt="hold", max_tokens=400, stream=True) as stream:
        next(iter(stream))
        check_equal(cases.refusal(openai.InternalServerError, create, **body).code, "server_overloaded")
    stranger = cases.openai_client("wrong").completions.create
    check_equal(cases.refusal(openai.AuthenticationError, stranger, **body).code, "invalid_api_key")
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:  # the server notices the disconnect at its next write
        try:
            create(**body)
            break
        except openai.InternalServerError:
            time.sleep(0.02)
    cases.call(limited_create, **body)
    check_equal(cases.refusal(openai.RateLimitError, limited_create, **body).code, "rate_limit_exceeded")


KINDS: dict[str, tuple[Callable[[Cases], None], ...]] = {
    "agents": (
        chat_plain, chat_tools, chat_parse, response_plain, response_tools, response_parse, message_plain,
        message_tools, message_parse, message_thread, openai_refusals, anthropic_refusals, rate_limits, models,
    ),
    "completions": (completion_mistakes, chat_stops, completion_stops),
    "refusals": (overloaded,),
}  # fmt: skip


if __name__ == "__main__":
    job = json.loads(sys.stdin.read())
    cases = Cases(job)
    cases.run(KINDS[job["kinds"]], job["count"], job["num_cases"])
    counts = {name: getattr(cases, name) for name in ("num_calls", "num_stops", "num_refused", "kinds", "wrong")}
    print(json.dumps({**counts, "versions": {"openai": openai.__version__, "anthropic": anthropic.__version__}}))
