"""Finding A2: 82 tools were checked one by one, each for a tenth of a second, whether their client had left or not, and
everybody's text waited for it; what was refused was checked again with every turn of the conversation."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from quire.client.engines.opening import OpenedModel
from quire.client.request.conversation import Tool, ToolUse, converse
from quire.client.request.text_model import TextModel
from quire.client.request.text_pool import TextPool
from quire.core.work_budget import LIMITS
from quire.errors import InvalidParameterError, WorkBudgetError
from quire.text.chat.rendering.template import ChatTemplate
from quire.text.grammars.checker import GrammarChecker
from quire.text.grammars.grammar import Grammar
from quire.text.sandboxed.messages import FromChecker, GrammarFine, GrammarRefused
from quire.text.text_work import TextBudget, run_charged
from tests.api.dialects.test_tools import TEMPLATE
from tests.support.errors import raises_code
from tests.support.machine.sandboxed import pool_of
from tests.support.servers.talkers import talker

SLOW_S = LIMITS["grammar_check"].request_s / 3
HELLO = [{"role": "user", "content": "Hello"}]


class SlowChecker(GrammarChecker):
    """Its process takes long for whatever it gets, as these tests say, and finds it wrong."""

    def __init__(self, spent_s: float = SLOW_S) -> None:
        super().__init__(lambda: pytest.fail("nothing is started here"))
        self.spent_s = spent_s
        self.num_checks = 0
        self.meanwhile: Callable[[], None] = lambda: None
        self.is_right = False

    def _answer(self, grammar: Grammar, cpu_s: float) -> FromChecker:
        self.num_checks += 1
        self.meanwhile()
        return GrammarFine(self.spent_s) if self.is_right else GrammarRefused("it is wrong", self.spent_s)


@cache
def opened() -> tuple[OpenedModel, ChatTemplate]:
    return talker(), ChatTemplate(TEMPLATE, {})


def model(checker: GrammarChecker) -> TextModel:
    (one, template), text = opened(), opened()[0].text
    info, tokenizer = replace(one.engine.info, max_sequence_tokens=1 << 16), text.tokenizer.limited(1 << 20, 1 << 16)
    return TextModel("m", info, tokenizer, template, text.eos_token_ids, {}, checker)


def tools(count: int, *, is_strict: bool = False) -> ToolUse:
    schemas = [{"type": "object", "properties": {"a": {"const": number}}} for number in range(count)]
    return ToolUse([Tool(f"f{at}", parameters=one, is_strict=is_strict) for at, one in enumerate(schemas)])


def asked(checker: SlowChecker, use: ToolUse, budget: TextBudget | None = None) -> Any:
    return run_charged("t", budget or TextBudget(), lambda: False, lambda: converse(model(checker), HELLO, use))


def test_a_request_has_one_budget_for_all_its_tools() -> None:
    checker = SlowChecker()
    assert asked(checker, tools(82)).grammar is not None
    assert checker.num_checks <= 4


def test_behind_its_budget_a_strict_tool_is_refused() -> None:
    checker = SlowChecker(spent_s=1.0)
    with raises_code(InvalidParameterError, "strict_schema_unsupported"):
        asked(checker, tools(3, is_strict=True))
    assert checker.num_checks == 1


def test_what_was_refused_is_not_checked_again() -> None:
    checker = SlowChecker(spent_s=0.001)
    asked(checker, tools(5))
    num_checks = checker.num_checks
    asked(checker, tools(5))
    assert checker.num_checks == num_checks


def test_a_tool_is_known_wherever_it_comes_again() -> None:
    checker = SlowChecker(spent_s=0.001)
    asked(checker, tools(5))
    num_checks = checker.num_checks
    asked(checker, tools(6))
    assert checker.num_checks == num_checks + 3  # the whole, the new tool, and what was made of them


def test_a_tenant_that_goes_on_is_refused_with_a_time_to_come_back() -> None:
    checker, budget = SlowChecker(spent_s=0.19), TextBudget()

    def ask_for_ever() -> None:
        for number in range(1000):
            with pytest.raises(InvalidParameterError):
                run_charged("t", budget, lambda: False, lambda at=number: checker.check(Grammar.regex(f"a{at}")))  # type: ignore[misc]

    with pytest.raises(WorkBudgetError) as refused:
        ask_for_ever()
    assert refused.value.retry_after_s > 0
    checker.is_right = True
    run_charged("other", budget, lambda: False, lambda: checker.check(Grammar.regex("b")))


def test_the_work_of_a_client_that_has_left_ends_before_the_next_check() -> None:
    checker = SlowChecker(spent_s=0.001)
    is_left = threading.Event()

    async def leave() -> None:
        pool, began = TextPool(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def in_the_check() -> None:
            loop.call_soon_threadsafe(began.set)
            assert is_left.wait(60)

        checker.meanwhile = in_the_check
        asking = asyncio.ensure_future(pool.run("t", lambda: converse(model(checker), HELLO, tools(82))))
        await began.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        is_left.set()
        await pool.run("t", lambda: None)  # the tenant's next turn: the one before has ended

    asyncio.run(leave())
    assert checker.num_checks == 1


def test_what_is_known_is_looked_up_while_another_is_checked() -> None:
    checker = SlowChecker(spent_s=0.001)
    checker.is_right = True
    checker.check(Grammar.regex("a"))
    began, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        assert goes_on.wait(60)

    checker.meanwhile = wait
    other = threading.Thread(target=checker.check, args=(Grammar.regex("b"),))
    other.start()
    assert began.wait(60)
    checker.check(Grammar.regex("a"))  # hangs if it waits for the other's check
    goes_on.set()
    other.join()


def test_who_checks_many_lets_others_in_between() -> None:
    checker, order = GrammarChecker(lambda: pytest.fail("nothing is started here")), list[str]()
    helpers = pool_of(checker)
    waits, goes_on = threading.Event(), threading.Event()

    def many() -> None:
        for number in range(3):
            with helpers.reserve():
                order.append("many")
                if number == 0:
                    waits.set()
                    assert goes_on.wait(60)

    first = threading.Thread(target=many)
    first.start()
    assert waits.wait(60)

    def one() -> None:
        with helpers.reserve():
            order.append("one")

    second = threading.Thread(target=one)
    second.start()
    while len(helpers._tickets) < 2:
        pass
    goes_on.set()
    first.join()
    second.join()
    assert order == ["many", "one", "many", "many"]
