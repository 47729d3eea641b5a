"""What makes prompts unstable is found, and nothing else is."""

from collections.abc import Callable
from typing import Any

import pytest

from quire.client.prefix import prefix_guard
from quire.client.prefix.prefix_guard import HOUR_S, MAX_TENANT_PATTERNS
from tests.support.fleet.prefix_corpus import RULES, Body, corpus, stable_bodies, unstable_bodies
from tests.support.servers.guarded_prompts import GuardedPrompts

UNSTABLE, STABLE = corpus("unstable"), corpus("stable")


def named(case: dict[str, Any]) -> str:
    return str(case["name"])


def system(text: str, question: str) -> Body:
    return Body([{"role": "system", "content": text}, {"role": "user", "content": question}])


def clocks(num: int, line: str = "The time is 08:{:02}:00.") -> list[Body]:
    return [system(f"{line.format(number)}\n{RULES}", f"Question {number}?") for number in range(num)]


def test_the_corpus_is_as_large_as_it_is_said_to_be() -> None:
    assert len(UNSTABLE) >= 30
    assert len(STABLE) >= 20
    assert len({case["name"] for case in UNSTABLE + STABLE}) == len(UNSTABLE) + len(STABLE)


@pytest.mark.parametrize("case", UNSTABLE, ids=named)
def test_an_unstable_prefix_is_found(case: dict[str, Any]) -> None:
    for seed in (0, 1):
        found = GuardedPrompts().play(unstable_bodies(case, seed), case.get("template", ""))
        assert case["kind"] in {one.kind for one in found}


@pytest.mark.parametrize("case", STABLE, ids=named)
def test_a_stable_conversation_is_no_warning(case: dict[str, Any]) -> None:
    for seed in (0, 1, 2):
        assert GuardedPrompts().play(stable_bodies(case, seed)) == []


def test_stable_conversations_of_many_people_of_one_tenant_are_no_warning() -> None:
    prompts = GuardedPrompts()
    for seed in range(3):
        for case in STABLE:
            assert prompts.play(stable_bodies(case, 100 + seed)) == [], case["name"]


def test_a_warning_names_the_line_and_what_it_cost() -> None:
    prompts = GuardedPrompts()
    (found,) = prompts.play(clocks(6))
    assert (found.kind, found.line, found.num_requests) == ("times", "The time is 08:05:00.", 5)
    num_rules = len(prompts.tokenizer.library.encode(RULES).ids)
    assert 5 * num_rules <= found.num_lost_tokens <= 5 * (num_rules + 40)
    assert f"{found.num_lost_tokens:,} tokens in the last hour" in found.sentence
    assert sum(prompts.counted) == found.num_lost_tokens


def test_nobody_is_warned_before_a_line_differs_again_and_again() -> None:
    prompts = GuardedPrompts()
    assert prompts.play(clocks(3)) == []
    assert prompts.counted == []
    assert len(prompts.play(clocks(5))) == 1


def test_each_pattern_is_said_aloud_once_an_hour() -> None:
    prompts = GuardedPrompts()
    prompts.play(clocks(20))
    assert len(prompts.told) == 1
    prompts.now_s += HOUR_S
    prompts.play(clocks(30)[20:])
    assert len(prompts.told) == 2


def test_what_was_lost_more_than_an_hour_ago_is_no_cost_of_the_last_hour() -> None:
    prompts = GuardedPrompts()
    assert prompts.play(clocks(6))
    assert prompts.guard.warnings(prompts.now_s + HOUR_S + 61) == []


def test_a_tenant_hears_of_its_own_lines_and_others_of_costs_alone() -> None:
    prompts = GuardedPrompts()
    prompts.play(clocks(6), tenant="one")
    prompts.play(clocks(6, "Secret word 08:{:02}:11 of two."), tenant="two")
    (mine,) = prompts.guard.warnings(prompts.now_s, tenant="one")
    assert mine.line == "The time is 08:05:00."
    both = prompts.guard.warnings(prompts.now_s)
    assert {one.tenant for one in both} == {"one", "two"}
    assert [one.line for one in both] == [None, None]
    assert all(one.line for one in prompts.guard.warnings(prompts.now_s, includes_lines=True))


def test_prompts_of_other_tenants_and_cache_groups_are_not_compared() -> None:
    prompts = GuardedPrompts()
    for number, body in enumerate(clocks(12)):
        prompts.play([body], tenant=f"t{number % 6}")
    assert prompts.guard.warnings(prompts.now_s) == []


def test_only_requests_that_lost_something_are_warned() -> None:
    prompts = GuardedPrompts()
    prompts.play([*clocks(6), system("Something else.", "And now?")])
    assert prompts.guard.warnings_of_request("r6", prompts.now_s)[0].kind == "times"
    assert prompts.guard.warnings_of_request("r1", prompts.now_s) == []
    assert prompts.guard.warnings_of_request("r7", prompts.now_s) == []
    assert prompts.guard.warnings_of_request("nobody", prompts.now_s) == []


def test_what_is_shown_of_a_line_is_short_and_harmless() -> None:
    prompts = GuardedPrompts()
    (found,) = prompts.play(clocks(6, "\x1b[31m" + "wide " * 60 + "{:02}:00"))
    assert found.line is not None
    assert len(found.line) <= 160
    assert found.line.isprintable()


@pytest.mark.parametrize("make", [lambda n: f"a{n}b" * 5, lambda n: "x" * n, lambda n: f"{n}\n" * 40])
def test_patterns_and_prompts_are_bounded_whatever_a_tenant_sends(
    make: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_guard, "MAX_PATTERNS", 100)
    prompts = GuardedPrompts()
    for tenant in range(3):
        for number in range(120):
            text = f"{make(number)} word{number} {number}:30 \n{RULES[:200]}\n{make(number + 1)}"
            prompts.play([system(text, "So?")], tenant=f"t{tenant}")
    assert prompts.guard._num_patterns <= 100
    assert all(len(one) <= MAX_TENANT_PATTERNS for one in prompts.guard._patterns.values())


def test_a_prompt_whose_prefix_was_evicted_is_no_line_s_fault() -> None:
    prompts = GuardedPrompts()
    prompts.reason = "evicted"
    assert prompts.play(clocks(8)) == []
