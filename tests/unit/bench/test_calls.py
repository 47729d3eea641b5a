"""What is sent."""

import json
from typing import Any

from quire.bench.calls import CallMaker
from quire.errors import ConfigError
from quire.workload.visits import Span, Turn, Visit
from quire.workload.writing import SpanWriter
from tests.support.errors import raises_code

VISIT = Visit(
    "v", (Turn((Span("one", 3),), 5), Turn((Span("two", 2),), 6)), system=(Span("system", 4),), priority="high"
)
WRITER = SpanWriter("1")


def body(maker: CallMaker, *answers: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(maker.make_call(VISIT, answers).body)
    return fields


def test_a_chat_carries_all_that_was_said_and_answered() -> None:
    maker = CallMaker("m", "chat", WRITER)
    said = body(maker, "yes")
    assert [(one["role"], len(one["content"].split())) for one in said["messages"]] == [
        ("system", 4),
        ("user", 3),
        ("assistant", 1),
        ("user", 2),
    ]
    assert said["max_tokens"] == 6
    assert maker.make_call(VISIT, ["yes"]).path == "/v1/chat/completions"
    assert maker.make_call(VISIT, ["yes"]).prompt_tokens == 9


def test_the_next_turn_as_text_begins_with_the_turn_and_answer_before() -> None:
    maker = CallMaker("m", "text", WRITER)
    first, second = body(maker)["prompt"], body(maker, " indeed")["prompt"]
    assert second.startswith(f"{first} indeed")
    assert first.startswith(WRITER.words(VISIT.system))


def test_token_ids_are_exact_and_cannot_hold_a_conversation() -> None:
    maker = CallMaker("m", "tokens", WRITER)
    assert len(body(maker)["prompt"]) == 7
    with raises_code(ConfigError, "invalid_config"):
        maker.check([VISIT])


def test_every_token_meant_is_asked_for_and_usage_is_wanted() -> None:
    said = body(CallMaker("m", "text", WRITER))
    assert (said["model"], said["stream"], said["ignore_eos"]) == ("m", True, True)
    assert said["stream_options"] == {"include_usage": True}
    assert "priority" not in said


def test_a_stranger_can_be_spared_our_fields_and_given_others() -> None:
    said = body(CallMaker("m", "text", WRITER, ignores_eos=False, extra={"top_k": 1, "temperature": 1.0}))
    assert "ignore_eos" not in said
    assert (said["top_k"], said["temperature"]) == (1, 1.0)


def test_a_field_laid_over_with_null_is_not_sent() -> None:
    assert "stream_options" not in body(CallMaker("m", "text", WRITER, extra={"stream_options": None}))


def test_a_class_is_sent_as_the_number_the_wire_knows() -> None:
    assert body(CallMaker("m", "text", WRITER, sends_priority=True))["priority"] < 0
