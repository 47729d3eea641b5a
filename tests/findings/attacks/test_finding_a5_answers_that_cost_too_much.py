"""An answer whose reading costs too much is ended with its error; answers beside it lose nothing."""

from dataclasses import dataclass
from time import monotonic

import pytest

from quire.api.dialects.answering import check_finish
from quire.api.http.errors import api_error_of
from quire.client.reply import reply as reply_room
from quire.client.reply.reply import Reply
from quire.client.request.params import SamplingParams
from quire.client.request.requests import RequestOptions, make_request
from quire.core.events import SequenceFinished, Token
from quire.core.request import FinishReason
from quire.core.work_budget import LIMITS, TENANT_BURST_S, WorkAccount
from quire.errors import WorkBudgetError
from quire.text.parsers.reader import AnswerFormat
from quire.text.parsers.tool_format import HERMES
from quire.text.text_work import TextBudget
from tests.support.servers.talkers import talker

PARAMS = SamplingParams(max_tokens=99, n=2, answer_format=AnswerFormat(tools=HERMES))


@dataclass
class Seconds:
    """Processor time that passes at each look at it."""

    at_s: float = 0.0
    step_s: float = 0.0

    def __call__(self) -> float:
        self.at_s += self.step_s
        return self.at_s


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    made = Seconds()
    monkeypatch.setattr(reply_room, "thread_time", made)
    return made


def reply(budget: TextBudget | None = None) -> Reply:
    text = talker().text
    request = make_request(text, [1, 2, 3], PARAMS, RequestOptions(tenant="team"))
    return Reply(request, PARAMS, text.tokenizer, work=budget or TextBudget())


def token(index: int, number: int) -> Token:
    return Token("r", index, 4, number, None)


def test_an_answer_beyond_the_budget_is_ended_and_the_other_goes_on_to_its_end(seconds: Seconds) -> None:
    made = reply()
    made.take([token(0, 1), token(1, 1)])
    seconds.step_s = 2 * LIMITS["answer_reader"].at_once_s
    (cut,) = made.take([token(0, 2)])
    seconds.step_s = 0.0
    assert (cut.finish_reason, made.stopped_answers) == ("error", [0])
    assert "answer reader: expected at most 0.1 s of processor time (at once)" in str(cut.error)
    with pytest.raises(WorkBudgetError) as raised:
        check_finish(cut, made)
    refusal = api_error_of(raised.value, "r")
    assert (refusal.status, refusal.code) == (400, "work_budget_exceeded")
    made.take([token(1, 2), SequenceFinished("r", 1, FinishReason.STOP, 2, None)])
    completion = made.completion()
    assert [(one.finish_reason, len(one.token_ids)) for one in completion.answers] == [("error", 2), ("stop", 2)]


def test_what_comes_of_an_answer_that_was_ended_is_not_read(seconds: Seconds) -> None:
    made = reply()
    seconds.step_s = 1.0
    made.take([token(0, 1)])
    assert made.take([token(0, 2), SequenceFinished("r", 0, FinishReason.CANCELLED, 2, None)]) == []


def test_a_tenant_that_spent_all_it_has_may_come_again(seconds: Seconds) -> None:
    budget = TextBudget()
    budget.spend(WorkAccount("team"), "grammar_check", TENANT_BURST_S + 60.0, monotonic())
    made = reply(budget)
    seconds.step_s = 0.01
    (cut,) = made.take([token(0, 1)])
    with pytest.raises(WorkBudgetError) as raised:
        check_finish(cut, made)
    refusal = api_error_of(raised.value, "r")
    assert (refusal.status, refusal.code) == (429, "work_budget_exceeded")
