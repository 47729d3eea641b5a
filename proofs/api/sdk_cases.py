"""What the official Python SDKs make of a server: each case asks whole and streamed, and compares; or is refused.

    python sdk_cases.py < what      runs in an environment with `openai` and `anthropic`, and imports nothing of quire

`what` is one JSON object: `url`, `model`, `seed`, `kinds` (a key of `KINDS`), `count` (calls at least), `num_cases` (at
least), `key`, and `limited`, two keys that may ask once a minute. The last line on stdout is another: `num_calls`,
`num_stops`, `num_refused`, `kinds`, `versions`, `wrong`.
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
    """Asks, counts and compares."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.url, self.model, self.key = told["url"], told["model"], told["key"]
        self.limited: list[str] = told["limited"]
        self.random = Random(told["seed"])
        self.openai, self.anthropic = self.of_openai(self.key), self.of_anthropic(self.key)
        self.num_calls = self.num_stops = self.num_refused = 0
        self.kinds: Counter[str] = Counter()
        self.wrong: list[str] = []

    def of_openai(self, key: str) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def of_anthropic(self, key: str) -> Any:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0)

    def run(self, kinds: tuple[Callable[["Cases"], None], ...], count: int, num_cases: int) -> None:
        """These kinds in turn, until there were so many calls and cases."""
        for at, case in enumerate(itertools.cycle(kinds)):
            if self.num_calls >= count and at >= num_cases:
                return
            self.kinds[case.__name__] += 1
            try:
                case(self)
            except Exception as error:  # whatever it is, the SDK's user would have met it
                self.wrong.append(f"python, {case.__name__}: {error!r}"[:600])

    # -- asking --------------------------------------------------------------------------------------------------------

    def question(self) -> str:
        return f"Tell me of the {' and the '.join(self.random.choices(WORDS, k=3))}."

    def turn(self, text: str | None = None) -> list[Any]:
        return [{"role": "user", "content": text or self.question()}]

    def asked(self, **more: Any) -> dict[str, Any]:
        """What stands in every body. The same question gets the same answer; one SDK has no word for how."""
        return {"model": self.model, "extra_body": {"temperature": 0}, **more}

    def call(self, ask: Callable[..., Any], **body: Any) -> Any:
        self.num_calls += 1
        return ask(**body)

    def refused(self, kind: Any, ask: Callable[..., Any], **body: Any) -> Any:
        """The error that it must be."""
        try:
            self.call(ask, **body)
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            own = (kind.__name__, "ThreadNotFoundError")
            holds(isinstance(error, kind) and type(error).__name__ in own, error)
            holds("retry-after" in error.response.headers or error.status_code not in (429, 503), error)
            self.num_refused += 1
            return error
        raise AssertionError(f"it was answered, and {kind.__name__} was wanted")


def holds(is_so: bool, what: Any) -> None:
    """Or it is wrong."""
    if not is_so:
        raise AssertionError(f"{what}")


def same(one: Any, other: Any) -> None:
    """Or it is wrong."""
    holds(one == other, f"{one} is not {other}")


# -- chats -------------------------------------------------------------------------------------------------------------


def chat_said(completion: Any) -> Any:
    """What of an answer must be the same."""
    (choice,) = completion.choices
    calls = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls or ()]
    return choice.message.content or "", calls, choice.finish_reason


def chat_streamed(cases: Cases, body: dict[str, Any]) -> Any:
    """By the helper, and its deltas joined by hand."""
    said = ""
    cases.num_calls += 1
    try:
        with cases.openai.chat.completions.stream(**body) as stream:
            for event in stream:
                said += event.delta if event.type == "content.delta" else ""
            final = stream.get_final_completion()
    except openai.LengthFinishReasonError as error:  # how this helper tells of an answer that was cut
        final = error.completion
        same(final.choices[0].finish_reason, "length")
    same(said, final.choices[0].message.content or "")
    return final


def chat_plain(cases: Cases) -> None:
    """With a seed and a temperature, by three ways."""
    how = {"temperature": cases.random.choice((0, 0.8)), "seed": cases.random.randrange(99), "max_tokens": 24}
    body = {"model": cases.model, "messages": cases.turn(), **how}
    whole = cases.call(cases.openai.chat.completions.create, **body)
    same(chat_said(chat_streamed(cases, body)), chat_said(whole))
    texts, usage = "", None
    options = {"include_usage": True}
    for chunk in cases.call(cases.openai.chat.completions.create, **body, stream=True, stream_options=options):
        texts += "".join(one.delta.content or "" for one in chunk.choices)
        usage = chunk.usage or usage
    same(texts, whole.choices[0].message.content)
    same(usage and usage.completion_tokens, whole.usage.completion_tokens)


def chat_tools(cases: Cases) -> None:
    """A call, then what it gave."""
    by_name = {"type": "function", "function": {"name": "find"}}
    body = cases.asked(messages=cases.turn(), tools=CHAT_TOOLS, tool_choice=cases.random.choice(("required", by_name)))
    body |= {"max_tokens": 60, "parallel_tool_calls": False}
    whole = cases.call(cases.openai.chat.completions.create, **body)
    same(chat_said(chat_streamed(cases, body)), chat_said(whole))
    same(whole.choices[0].finish_reason, "tool_calls")
    message = whole.choices[0].message
    (call,) = message.tool_calls
    Place.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "found"}
    history = [*body["messages"], message, result]
    after = cases.call(cases.openai.chat.completions.create, **{**body, "messages": history, "tool_choice": "auto"})
    holds(after.usage.prompt_tokens > whole.usage.prompt_tokens, after.usage)


def chat_parse(cases: Cases) -> None:
    """Into a class, whole and streamed; and the arguments of a call."""
    body = cases.asked(messages=cases.turn(), max_tokens=60)
    whole = cases.call(cases.openai.chat.completions.parse, **body, response_format=Place)
    parsed = whole.choices[0].message.parsed
    holds(isinstance(parsed, Place), whole)
    same(chat_streamed(cases, {**body, "response_format": Place}).choices[0].message.parsed, parsed)
    tools = [openai.pydantic_function_tool(Place, name="find")]
    called = cases.call(
        cases.openai.chat.completions.parse, **body, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    holds(isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Place), called)


# -- responses ---------------------------------------------------------------------------------------------------------


def response_said(response: Any) -> Any:
    """What of an answer must be the same."""
    items = [(one.type, getattr(one, "name", None), getattr(one, "arguments", None)) for one in response.output]
    return items, response.output_text, response.status, response.usage.output_tokens


def response_streamed(cases: Cases, body: dict[str, Any]) -> Any:
    """By the events, which the helper passes on; the last has all of it."""
    said, last = "", cast("Any", None)
    cases.num_calls += 1
    with cases.openai.responses.stream(**body) as stream:
        for event in stream:
            said += event.delta if event.type == "response.output_text.delta" else ""
            last = event
        if last.type == "response.completed":
            same(response_said(stream.get_final_response()), response_said(last.response))
    holds(last is not None and last.type in ("response.completed", "response.incomplete"), last)
    same(said, last.response.output_text)
    return last.response


def response_plain(cases: Cases) -> None:
    """Whole and streamed, then gone on with by its id."""
    body = cases.asked(input=cases.question(), max_output_tokens=24, instructions="Be brief.")
    whole = cases.call(cases.openai.responses.create, **body)
    same(response_said(response_streamed(cases, body)), response_said(whole))
    more = cases.question()
    by_id = cases.call(cases.openai.responses.create, **{**body, "input": more}, previous_response_id=whole.id)
    history = [*cases.turn(body["input"]), *whole.output, *cases.turn(more)]
    all_of_it = cases.call(cases.openai.responses.create, **{**body, "input": history}, store=False)
    same(response_said(by_id), response_said(all_of_it))
    same(cases.call(lambda: cases.openai.responses.retrieve(whole.id)).output, whole.output)
    cases.call(lambda: cases.openai.responses.delete(whole.id))
    cases.refused(openai.NotFoundError, lambda: cases.openai.responses.retrieve(whole.id))


def response_tools(cases: Cases) -> None:
    """A call, then what it gave."""
    body = cases.asked(input=cases.turn(), tools=RESPONSE_TOOLS, tool_choice="required", max_output_tokens=60)
    body["parallel_tool_calls"] = False
    whole = cases.call(cases.openai.responses.create, **body)
    same(response_said(response_streamed(cases, body)), response_said(whole))
    (call,) = [one for one in whole.output if one.type == "function_call"]
    Place.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
    history = [*body["input"], *whole.output, result]
    after = cases.call(cases.openai.responses.create, **{**body, "input": history, "tool_choice": "auto"})
    holds(after.usage.input_tokens > whole.usage.input_tokens, after.usage)


def response_parse(cases: Cases) -> None:
    """Into a class."""
    body = cases.asked(input=cases.question(), max_output_tokens=60, text_format=Place)
    parsed = cases.call(cases.openai.responses.parse, **body).output_parsed
    holds(isinstance(parsed, Place), parsed)
    cases.num_calls += 1
    with cases.openai.responses.stream(**body) as stream:
        same(stream.get_final_response().output_parsed, parsed)


# -- messages ----------------------------------------------------------------------------------------------------------


def message_said(message: Any) -> Any:
    """What of an answer must be the same."""
    blocks = [(one.type, getattr(one, "text", None), getattr(one, "input", None)) for one in message.content]
    return blocks, message.stop_reason, message.usage.output_tokens


def message_streamed(cases: Cases, body: dict[str, Any]) -> Any:
    """By the helper, and its text joined by hand."""
    cases.num_calls += 1
    with cases.anthropic.messages.stream(**body) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    same(said, "".join(one.text for one in final.content if one.type == "text"))
    return final


def message_plain(cases: Cases) -> None:
    """Whole and streamed, and as long as was counted."""
    asked: dict[str, Any] = {"model": cases.model, "messages": cases.turn(), "system": "Be brief."}
    body = {**cases.asked(**asked), "max_tokens": 24}
    whole = cases.call(cases.anthropic.messages.create, **body)
    same(message_said(message_streamed(cases, body)), message_said(whole))
    counted = cases.call(cases.anthropic.messages.count_tokens, **asked).input_tokens
    same(counted, whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0))


def message_tools(cases: Cases) -> None:
    """A call, then what it gave."""
    choice = cases.random.choice(({"type": "any"}, {"type": "tool", "name": "find"}))
    body = cases.asked(messages=cases.turn(), tools=MESSAGE_TOOLS, max_tokens=60)
    body["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    whole = cases.call(cases.anthropic.messages.create, **body)
    same(message_said(message_streamed(cases, body)), message_said(whole))
    same(whole.stop_reason, "tool_use")
    (call,) = [one for one in whole.content if one.type == "tool_use"]
    Place.model_validate(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "found"}
    answered = [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    body |= {"messages": [*body["messages"], *answered], "tool_choice": {"type": "auto"}}
    after = cases.call(cases.anthropic.messages.create, **body)
    holds(after.usage.output_tokens > 0, after)


def message_parse(cases: Cases) -> None:
    """Into a class."""
    body: dict[str, Any] = {"model": cases.model, "messages": cases.turn(), "max_tokens": 60}
    parsed = cases.call(cases.anthropic.messages.parse, **body, output_format=Place).parsed_output
    holds(isinstance(parsed, Place), parsed)


def message_thread(cases: Cases) -> None:
    """A conversation that the server keeps, beside the same sent whole; and a tool that the SDK runs by itself."""
    first, second = cases.turn()[0], cases.turn()[0]
    always = cases.asked(max_tokens=20)
    thread = cases.anthropic.beta.messages.thread(**always, system="Be brief.")
    one, two = cases.call(lambda: thread.send(first)), cases.call(lambda: thread.send(second))
    holds(thread.previous_message_id is not None, "the thread was not kept")
    history = [first, {"role": "assistant", "content": one.content}, second]
    whole = cases.call(cases.anthropic.messages.create, **always, system="Be brief.", messages=history)
    same(message_said(two), message_said(whole))
    called: list[str] = []

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def find(city: Literal["Bonn", "Oslo"]) -> str:
        """Finds a city."""
        called.append(city)
        return "found"

    choice = {"type": "any", "disable_parallel_tool_use": True}
    told = {**always, "max_tokens": 200, "tools": [find], "tool_choice": choice, "messages": cases.turn()}
    cases.num_calls += 2
    messages = [*cases.anthropic.beta.messages.tool_runner(**told, max_iterations=2)]
    same(len(messages), 2)
    holds(bool(called), "the tool was not run")


# -- refusals ----------------------------------------------------------------------------------------------------------


def openai_refusals(cases: Cases) -> None:
    """Mistakes, each as an error of its own kind."""
    chat, responses = cases.openai.chat.completions.create, cases.openai.responses.create
    asked: dict[str, Any] = {"model": cases.model, "messages": cases.turn(), "max_tokens": 2}
    same(cases.refused(openai.NotFoundError, chat, **{**asked, "model": "nobody"}).code, "model_not_found")
    wrong = cases.refused(openai.BadRequestError, chat, **{**asked, "temperature": -1})
    same((wrong.code, wrong.param), ("invalid_parameter", "temperature"))
    long = cases.refused(openai.BadRequestError, responses, model=cases.model, input="x " * 1900)
    same(long.code, "context_length_exceeded")
    tool = {"type": "function", "function": {"name": "no way"}}
    same(cases.refused(openai.BadRequestError, chat, **asked, tools=[tool]).param, "tools")
    lost = {"model": cases.model, "input": "x", "previous_response_id": "resp_none"}
    same(cases.refused(openai.BadRequestError, responses, **lost).code, "previous_response_not_found")
    cases.refused(openai.AuthenticationError, cases.of_openai("wrong").responses.create, model="x", input="x")


def anthropic_refusals(cases: Cases) -> None:
    """The same in the other API."""
    create = cases.anthropic.messages.create
    asked: dict[str, Any] = {"model": cases.model, "messages": cases.turn(), "max_tokens": 2}
    same(cases.refused(anthropic.NotFoundError, create, **{**asked, "model": "nobody"}).type, "not_found_error")
    wrong = cases.refused(anthropic.BadRequestError, create, **asked, extra_body={"temperature": -1})
    same(wrong.type, "invalid_request_error")
    long = cases.refused(anthropic.BadRequestError, create, **{**asked, "messages": cases.turn("x " * 1900)})
    found = TOO_LONG.fullmatch(long.body["error"]["message"])
    holds(found is not None and int(found[1]) > int(found[2]), long.body)
    lost = {"thread": {"type": "continue", "previous_message_id": "msg_none"}}
    same(cases.refused(anthropic.NotFoundError, create, **asked, extra_body=lost).error_code, "thread_not_found")
    stranger = cases.of_anthropic("wrong").messages
    same(cases.refused(anthropic.AuthenticationError, stranger.create, **asked).type, "authentication_error")
    cases.refused(anthropic.AuthenticationError, stranger.count_tokens, model=cases.model, messages=cases.turn())


def rate_limits(cases: Cases) -> None:
    """A key that may ask once a minute: the second time it is told when to come again."""
    if not cases.limited:
        return
    first, second = cases.limited
    cases.limited = []
    asked: dict[str, Any] = {"model": cases.model, "messages": cases.turn()}
    chat = cases.of_openai(first).chat.completions.create
    cases.call(chat, **asked, max_tokens=1)
    cases.refused(openai.RateLimitError, chat, **asked, max_tokens=1)
    messages = cases.of_anthropic(second).messages
    cases.call(messages.create, **asked, max_tokens=1)
    same(cases.refused(anthropic.RateLimitError, messages.count_tokens, **asked).type, "rate_limit_error")


def models(cases: Cases) -> None:
    """Listed and looked up, by both."""
    for client in (cases.openai, cases.anthropic):
        listed = [one.id for one in cases.call(client.models.list).data]
        same(listed, [cases.model])
        same(cases.call(lambda client=client: client.models.retrieve(cases.model)).id, cases.model)


# -- several answers, cut by a stop ------------------------------------------------------------------------------------

Choices = list[tuple[str, str]]
"""Texts and why they ended."""


def chat_choices(cases: Cases, body: dict[str, Any]) -> Choices:
    """Whole, with log-probabilities of every token."""
    whole = cases.call(cases.openai.chat.completions.create, **body, logprobs=True, top_logprobs=2)
    rows = [row for one in whole.choices for row in (one.logprobs and one.logprobs.content) or ()]
    holds(all(row.logprob <= 0 and len(row.top_logprobs) == 2 for row in rows), rows[:2])
    same(len(rows), whole.usage.completion_tokens)
    return [(one.message.content or "", str(one.finish_reason)) for one in whole.choices]


def chat_chunks(cases: Cases, body: dict[str, Any]) -> Choices:
    """The same, streamed."""
    texts, reasons, num_rows, usage = [""] * body["n"], [""] * body["n"], 0, cast("Any", None)
    more = {"logprobs": True, "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True}}
    for chunk in cases.call(cases.openai.chat.completions.create, **body, **more):
        for one in chunk.choices:
            texts[one.index] += one.delta.content or ""
            reasons[one.index] = one.finish_reason or reasons[one.index]
            num_rows += len((one.logprobs and one.logprobs.content) or ())
        usage = chunk.usage
    same(usage.completion_tokens, num_rows)
    return list(zip(texts, reasons, strict=True))


def completion_choices(cases: Cases, body: dict[str, Any]) -> Choices:
    """Whole, with log-probabilities of every token."""
    whole = cases.call(cases.openai.completions.create, **body, logprobs=1)
    rows = [len((one.logprobs and one.logprobs.token_logprobs) or ()) for one in whole.choices]
    same(sum(rows), whole.usage.completion_tokens)
    return [(one.text, one.finish_reason) for one in whole.choices]


def completion_chunks(cases: Cases, body: dict[str, Any]) -> Choices:
    """The same, streamed."""
    texts, reasons = [""] * body["n"], [""] * body["n"]
    for piece in cases.call(cases.openai.completions.create, **body, logprobs=1, stream=True):
        for one in piece.choices:
            texts[one.index] += one.text
            reasons[one.index] = one.finish_reason or reasons[one.index]
    return list(zip(texts, reasons, strict=True))


def chat_stops(cases: Cases) -> None:
    """Chats."""
    cut_by_a_stop(cases, chat_choices, chat_chunks, {"messages": cases.turn()})


def completion_stops(cases: Cases) -> None:
    """Texts."""
    cut_by_a_stop(cases, completion_choices, completion_chunks, {"prompt": cases.question()})


Ask = Callable[[Cases, dict[str, Any]], Choices]


def cut_by_a_stop(cases: Cases, whole: Ask, streamed: Ask, body: dict[str, Any]) -> None:
    """Whole, again, streamed; and with a stop from the middle of the answer, which is therefore known to come."""
    dice = cases.random
    body |= {"model": cases.model, "max_tokens": dice.randint(8, 40), "seed": dice.randrange(999)}
    body["n"] = dice.choice([1, 1, 2, 3])
    first = whole(cases, body)
    same([whole(cases, body), streamed(cases, body), len(first)], [first, first, body["n"]])
    text = first[0][0]
    places = [at for at in range(1, len(text) - 2) if text[at : at + 2].isascii() and text[at : at + 2].isprintable()]
    if not places:
        return
    cases.num_stops += 1
    at = dice.choice(places)
    stop = text[at : at + 2]
    body["stop"] = dice.choice([stop, [stop], ["\x01\x02", stop]])
    cut = whole(cases, body)
    same(streamed(cases, body), cut)
    for (text, _), (short, reason) in zip(first, cut, strict=True):
        holds(stop not in short, (body, short))
        if stop in text:
            same((short, reason), (text.partition(stop)[0], "stop"))


def completion_mistakes(cases: Cases) -> None:
    """One of them."""
    asked: dict[str, Any] = {"model": cases.model, "prompt": "x"}
    mistakes = (
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found"),
        ({"n": 9}, openai.BadRequestError, "invalid_parameter"),
        ({"prompt": "x " * 1900}, openai.BadRequestError, "context_length_exceeded"),
        ({"temperature": -1}, openai.BadRequestError, "invalid_parameter"),
    )
    mistake, kind, code = cases.random.choice(mistakes)
    same(cases.refused(kind, cases.openai.completions.create, **{**asked, **mistake}).code, code)


def overloaded(cases: Cases) -> None:
    """Where one request holds the only place; then a wrong key, and a key that may ask once a minute."""
    asked: dict[str, Any] = {"model": cases.model, "prompt": "x", "max_tokens": 1}
    create, once = cases.openai.completions.create, cases.of_openai(cases.limited[0]).completions.create
    with create(model=cases.model, prompt="hold", max_tokens=400, stream=True) as held:
        next(iter(held))
        same(cases.refused(openai.InternalServerError, create, **asked).code, "server_overloaded")
    stranger = cases.of_openai("wrong").completions.create
    same(cases.refused(openai.AuthenticationError, stranger, **asked).code, "invalid_api_key")
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:  # the server learns of the client that left when it writes to it
        try:
            create(**asked)
            break
        except openai.InternalServerError:
            time.sleep(0.02)
    cases.call(once, **asked)
    same(cases.refused(openai.RateLimitError, once, **asked).code, "rate_limit_exceeded")


KINDS: dict[str, tuple[Callable[[Cases], None], ...]] = {
    "agents": (
        chat_plain, chat_tools, chat_parse, response_plain, response_tools, response_parse, message_plain,
        message_tools, message_parse, message_thread, openai_refusals, anthropic_refusals, rate_limits, models,
    ),
    "completions": (completion_mistakes, chat_stops, completion_stops),
    "refusals": (overloaded,),
}  # fmt: skip


if __name__ == "__main__":
    asked = json.loads(sys.stdin.read())
    cases = Cases(asked)
    cases.run(KINDS[asked["kinds"]], asked["count"], asked["num_cases"])
    counts = {name: getattr(cases, name) for name in ("num_calls", "num_stops", "num_refused", "kinds", "wrong")}
    print(json.dumps({**counts, "versions": {"openai": openai.__version__, "anthropic": anthropic.__version__}}))
