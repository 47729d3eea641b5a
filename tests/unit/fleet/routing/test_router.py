"""Who gets a request."""

from collections import Counter
from random import Random

import pytest

from quire.core.memory.block_table import max_hit_blocks
from quire.errors import ConfigError, InvariantError
from quire.fleet.routing.block_index import UNCONFIRMED_S
from quire.fleet.routing.block_names import names_of, root_name
from quire.fleet.routing.membership import Assignment, MemberState
from quire.fleet.routing.router import RoutedPrompt, Router, RoutingChoice
from tests.support.errors import raises_code
from tests.support.fleet.router_invariants import ranked

SIZE = 4
ROOT = root_name("model", "", "")


def router_of(*members: str, **settings: float) -> Router:
    router = Router(**settings)  # type: ignore[arg-type]
    for member in members:
        router.join(member, SIZE, 0.0)
        router.mark_ready(member, 0.0)
    return router


def prompt_of(request_id: str, tokens: list[int], *sizes: int) -> RoutedPrompt:
    names = {size: names_of(ROOT, tokens, size) for size in sizes or (SIZE,)}
    return RoutedPrompt(request_id, len(tokens), names)


def fresh(request_id: str, num_tokens: int = 100) -> RoutedPrompt:
    """A prompt that has nothing in common with any other."""
    return prompt_of(request_id, [int(request_id[1:]) + 1000] * num_tokens)


def chosen(router: Router, prompt: RoutedPrompt, now_s: float = 0.0, exclude: tuple[str, ...] = ()) -> RoutingChoice:
    choice = router.choose(prompt, now_s, exclude)
    assert choice is not None
    return choice


# -- the cost ----------------------------------------------------------------------------------------------------------


def test_the_cost_is_four_times_the_uncached_tokens_and_those_in_flight() -> None:
    router, prompt = router_of("a", "b"), prompt_of("r1", list(range(21)))
    router.index.add_blocks("b", prompt.names[SIZE][:3])
    router.loads.report("a", 5, 0.0)
    router.loads.report("b", 60, 0.0)
    assert ranked(router, prompt) == [RoutingChoice("a", 1, 0, 4 * 21 + 5), RoutingChoice("b", 2, 12, 4 * 9 + 60)]
    router.loads.report("b", 40, 1.0)
    assert chosen(router, prompt) == RoutingChoice("b", 2, 12, 4 * 9 + 40)


def test_at_least_one_token_is_always_computed() -> None:
    router, prompt = router_of("a"), prompt_of("r1", list(range(20)))
    router.index.add_blocks("a", prompt.names[SIZE])
    assert chosen(router, prompt) == RoutingChoice("a", 1, 16, 16)
    assert router.loads.in_flight_tokens == {"a": 4}


@pytest.mark.parametrize("seed", range(60))
def test_the_choice_is_what_brute_force_finds(seed: int) -> None:
    random = Random(seed)
    weight = random.choice((0.0, 0.5, 1.0, 4.0))
    router = Router(uncached_weight=weight)
    sizes = {f"m{number}": random.choice((2, 3)) for number in range(random.randrange(1, 6))}
    held: dict[str, list[int]] = {}
    for member, size in sizes.items():
        router.join(member, size, 0.0)
        router.mark_ready(member, 0.0)
        held[member] = [random.randrange(2) for _ in range(random.randrange(12))]
        router.index.add_blocks(member, names_of(ROOT, held[member], size))
        router.loads.report(member, random.randrange(3), 0.0)
    last: dict[str, int] = dict.fromkeys(sizes, 0)
    for number in range(1, 8):
        tokens = [random.randrange(2) for _ in range(random.randrange(1, 12))]
        exclude = tuple(member for member in sizes if random.random() < 0.1)
        in_flight = dict(router.loads.in_flight_tokens)
        expected = []
        for member in set(sizes) - set(exclude):
            size, had = sizes[member], held[member]
            most = min(max_hit_blocks(len(tokens), size), len(had) // size)
            same = sum(tokens[: end * size] == had[: end * size] for end in range(1, most + 1))
            cost = weight * (len(tokens) - same * size) + in_flight[member]
            expected.append((cost, in_flight[member], last[member], member, same * size))
        expected.sort()
        prompt = prompt_of(f"r{number}", tokens, 2, 3)
        assert [(one.member, one.num_cached_tokens, one.cost) for one in ranked(router, prompt, exclude, weight)] == [
            (member, num_cached, cost) for cost, _, _, member, num_cached in expected
        ]
        choice = router.choose(prompt, float(number), exclude)
        if not expected:
            assert choice is None
            continue
        assert choice is not None
        cost, _, _, member, num_cached = expected[0]
        assert (choice.member, choice.num_cached_tokens, choice.cost) == (member, num_cached, cost)
        last[member] = number
        router.unassign(prompt.request_id)  # what it would have left there is not believed any more


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_is_the_first_of_all_with_whatever_is_believed_and_in_flight(seed: int) -> None:
    """The search that a choice makes ends early; that of a ranking does not."""
    random = Random(seed)
    weight = random.choice((0.5, 4.0))
    router = Router(uncached_weight=weight)
    for number in range(6):
        router.join(f"m{number}", 2, 0.0)
        router.mark_ready(f"m{number}", 0.0)
    for number in range(60):
        # A long way in common, so that depths lie behind the exact marks.
        tokens = [0] * random.randrange(1, 200) + [number] * random.randrange(1, 40)
        prompt = prompt_of(f"r{number}", tokens, 2)
        best = ranked(router, prompt, weight=weight)[0]
        assert router.choose(prompt, float(number)) == best
        if random.random() < 0.6:
            router.mark_computed(prompt.request_id)
        if random.random() < 0.5:
            names = prompt.names[2]
            router.index.add_blocks(best.member, names[: random.randrange(len(names) + 1)])


def test_members_of_different_block_sizes_are_compared_in_tokens() -> None:
    router, tokens = Router(), list(range(33))
    for member, size in (("small", 4), ("large", 8)):
        router.join(member, size, 0.0)
        router.mark_ready(member, 0.0)
    prompt = prompt_of("r1", tokens, 4, 8)
    router.index.add_blocks("small", prompt.names[4][:5])
    router.index.add_blocks("large", prompt.names[8][:3])
    assert [(one.member, one.num_cached_tokens) for one in ranked(router, prompt)] == [("large", 24), ("small", 20)]
    chosen(router, prompt)
    assert router.index.depths(prompt.names[8]) == {"large": 4}, "it is believed to bring its own kind of blocks"


def test_a_prompt_without_names_is_routed_by_load() -> None:
    router = router_of("a", "b")
    router.loads.report("a", 5, 0.0)
    assert chosen(router, RoutedPrompt("r1", 10)) == RoutingChoice("b", 2, 0, 40)


def test_looking_changes_nothing() -> None:
    router, prompt = router_of("a", "b"), fresh("r1")
    assert router.best(prompt) == router.best(prompt) == ranked(router, prompt)[0] == router.choose(prompt, 0.0)


# -- bursts ------------------------------------------------------------------------------------------------------------


def test_a_burst_of_equal_requests_is_spread_evenly() -> None:
    router = router_of("a", "b", "c", "d")
    counts = Counter(chosen(router, fresh(f"r{number}")).member for number in range(64))
    assert counts == {"a": 16, "b": 16, "c": 16, "d": 16}


def test_so_is_one_with_a_common_beginning() -> None:
    router = router_of("a", "b", "c", "d")
    counts: Counter[str] = Counter()
    for number in range(64):
        tokens = [1] * 8 + [number + 10] * 92
        counts[chosen(router, prompt_of(f"r{number}", tokens)).member] += 1
    assert max(counts.values()) * 4 / 64 <= 1.25


def test_those_that_have_nothing_to_compute_go_round() -> None:
    router = router_of("a", "b", "c")
    members = []
    for number in range(6):
        members.append(chosen(router, fresh(f"r{number}", 2)).member)
        router.mark_computed(f"r{number}")
    assert members == ["a", "b", "c", "a", "b", "c"]


def test_equal_costs_go_to_who_has_less_in_flight() -> None:
    router, prompt = router_of("a", "b"), prompt_of("r1", list(range(9)))
    router.index.add_blocks("a", prompt.names[SIZE][:1])
    router.loads.report("a", 16, 0.0)
    assert [one.cost for one in ranked(router, prompt)] == [36, 36]
    assert chosen(router, prompt).member == "b"


def test_one_prompt_stays_where_it_is_computed_until_the_queue_is_worth_more() -> None:
    router, tokens = router_of("a", "b"), list(range(101))
    members = [chosen(router, prompt_of(f"r{number}", tokens)).member for number in range(3)]
    assert members == ["a", "a", "a"]
    router.loads.report("a", 400, 1.0)
    assert chosen(router, prompt_of("r3", tokens), 1.0).member == "b"


def test_the_same_story_ends_the_same_way() -> None:
    def story() -> list[RoutingChoice | None]:
        random, router = Random(3), router_of("a", "b", "c")
        told = []
        for number in range(200):
            tokens = [random.randrange(2) for _ in range(random.randrange(1, 40))]
            told.append(router.choose(prompt_of(f"r{number}", tokens), number * 0.1))
            router.mark_computed(f"r{random.randrange(200)}")
            router.end_request(f"r{random.randrange(200)}")
            for member in "abc":
                router.record_heartbeat(member, number * 0.1)
            router.advance(number * 0.1)
        return told

    assert story() == story()


# -- who gets work -----------------------------------------------------------------------------------------------------


def test_nobody_ready_is_nobody_chosen() -> None:
    router = Router()
    assert router.choose(fresh("r1"), 0.0) is None
    router.join("a", SIZE, 0.0)
    assert router.choose(fresh("r1"), 0.0) is None
    router.mark_ready("a", 0.0)
    assert router.choose(fresh("r1"), 0.0, exclude=("a",)) is None
    assert ranked(router, fresh("r1"), exclude=("a",)) == []
    assert "r1" not in router.routed


def test_draining_and_suspect_members_get_nothing() -> None:
    router = router_of("a", "b", "c")
    router.choose(fresh("r0"), 0.0)
    router.drain("a")
    router.record_heartbeat("b", 4.0)
    assert [(one.member, one.new_state) for one in router.advance(4.4)] == []
    assert {chosen(router, fresh(f"r{number}"), 4.4).member for number in range(1, 9)} == {"b", "c"}
    assert {(one.member, one.new_state) for one in router.advance(4.5)} == {
        ("a", MemberState.GONE),
        ("c", MemberState.SUSPECT),
    }
    assert {chosen(router, fresh(f"r{number}"), 4.5).member for number in range(9, 19)} == {"b"}
    told = router.record_heartbeat("c", 5.0)
    assert told is not None
    assert chosen(router, fresh("r99"), 5.0).member == "c"


def test_a_draining_member_leaves_with_its_last_request_and_takes_all_with_it() -> None:
    router, prompt = router_of("a"), fresh("r1")
    chosen(router, prompt)
    assert [one.new_state for one in router.drain("a")] == [MemberState.DRAINING]
    router.mark_computed("r1")
    assert [one.new_state for one in router.end_request("r1")] == [MemberState.GONE]
    assert router.end_request("r1") == ()
    assert (router.index.members, router.loads.in_flight_tokens) == ((), {})
    assert router.index.depths(prompt.names[SIZE]) == {}


def test_who_comes_back_has_another_epoch_and_an_empty_cache() -> None:
    router, prompt = router_of("a"), fresh("r1")
    first = chosen(router, prompt)
    router.index.add_blocks("a", prompt.names[SIZE])
    assert [one.new_state for one in router.leave("a")] == [MemberState.GONE]
    assert not router.membership.is_current(first.assignment)
    router.join("a", SIZE, 1.0)
    router.mark_ready("a", 1.0)
    assert router.unassign("r1") == ()
    second = chosen(router, prompt, 1.0)
    assert (second.num_cached_tokens, second.epoch) == (0, first.epoch + 1)
    assert router.routed["r1"].assignment == second.assignment == Assignment("a", second.epoch)
    assert router.membership.num_open("a") == 1


# -- what becomes of requests ------------------------------------------------------------------------------------------


def test_a_request_weighs_until_its_prompt_is_computed_or_it_ends() -> None:
    router = router_of("a")
    for number in (1, 2, 3):
        chosen(router, fresh(f"r{number}", 10))
    router.mark_computed("r1")
    router.mark_computed("r1")
    assert router.loads.in_flight_tokens == {"a": 20}
    router.end_request("r2")
    assert router.loads.in_flight_tokens == {"a": 10}
    assert router.membership.num_open("a") == 2
    router.mark_computed("r2")
    router.mark_computed("never seen")
    assert router.loads.in_flight_tokens == {"a": 10}


def test_a_request_that_was_not_taken_goes_elsewhere_and_leaves_nothing_behind() -> None:
    router, prompt = router_of("a", "b"), fresh("r1")
    first = chosen(router, prompt)
    with raises_code(InvariantError, "invariant_broken"):
        router.choose(prompt, 0.0)
    router.unassign("r1")
    assert router.index.depths(prompt.names[SIZE]) == {}
    assert router.loads.in_flight_tokens == {"a": 0, "b": 0}
    second = chosen(router, prompt, 0.0, exclude=(first.member,))
    assert (first.member, second.member) == ("a", "b")
    assert router.index.depths(prompt.names[SIZE]) == {"b": 25}
    assert (router.membership.num_open("a"), router.membership.num_open("b")) == (0, 1)


def test_one_that_moves_after_its_prompt_was_computed_leaves_its_blocks_behind() -> None:
    router, prompt = router_of("a"), fresh("r1")
    chosen(router, prompt)
    router.mark_computed("r1")
    router.unassign("r1")
    assert router.index.depths(prompt.names[SIZE]) == {"a": 25}


def test_blocks_that_nobody_confirms_are_taken_back_as_time_goes_by() -> None:
    router, prompt = router_of("a"), fresh("r1")
    chosen(router, prompt)
    router.record_heartbeat("a", UNCONFIRMED_S)
    router.advance(UNCONFIRMED_S)
    assert router.index.depths(prompt.names[SIZE]) == {}


@pytest.mark.parametrize("seed", range(30))
def test_an_index_that_lies_costs_tokens_and_nothing_else(seed: int) -> None:
    random, router = Random(seed), router_of("a", "b", "c")
    names = range(12)
    for number in range(60):
        member = random.choice("abcd")
        told = [random.choice(names) for _ in range(random.randrange(6))]
        random.choice((router.index.add_blocks, router.index.remove_blocks))(member, told)
        if random.random() < 0.1:
            router.index.clear_blocks(member)
        asked = {SIZE: tuple(random.choice(names) for _ in range(random.randrange(8)))}
        prompt = RoutedPrompt(f"r{number}", random.randrange(1, 30), asked)
        choice = chosen(router, prompt, number * 2.0)
        assert 0 <= choice.num_cached_tokens < prompt.num_tokens
        assert choice.assignment.member in "abc"
        for one in "abc":
            router.record_heartbeat(one, number * 2.0)
        random.choice((router.mark_computed, router.unassign, router.end_request))(f"r{random.randrange(60)}")
        router.advance(number * 2.0)
    for number in range(60):
        router.end_request(f"r{number}")
    assert router.loads.in_flight_tokens == {"a": 0, "b": 0, "c": 0}


def test_mistakes_of_the_caller_are_told() -> None:
    with pytest.raises(ConfigError):
        Router(uncached_weight=-1.0)
    with raises_code(InvariantError, "invariant_broken"):
        RoutedPrompt("r1", 0)
    with raises_code(InvariantError, "invariant_broken"):
        Router().join("a", 0, 0.0)


def test_gateways_with_salts_have_orders_of_their_own_and_keep_them() -> None:
    def firsts(salt: str) -> list[str]:
        router = Router(salt=salt)
        for number in range(8):
            router.join(f"m{number}", 4, 0.0)
            router.mark_ready(f"m{number}", 0.0)
        choices = [router.choose(RoutedPrompt(f"r{at}", 10), 1.0) for at in range(8)]
        return [choice.member for choice in choices if choice is not None]

    orders = {tuple(firsts(f"gateway {at}")) for at in range(20)}
    assert len({order[0] for order in orders}) > 4
    assert all(sorted(order) == [f"m{number}" for number in range(8)] for order in orders)
    assert firsts("gateway 3") == firsts("gateway 3")
    assert firsts("") == [f"m{number}" for number in range(8)]


# -- several gateways --------------------------------------------------------------------------------------------------


def gateway(salt: str, num_gateways: int, idlest: str, age_s: float) -> Router:
    """One of several that all know the same of four members, and have sent as much as each other."""
    router = Router(salt=salt)
    for member in "abcd":
        router.join(member, SIZE, 0.0)
        router.mark_ready(member, 0.0)
        router.loads.report(member, 0 if member == idlest else 40, 10.0 - age_s)
    router.num_gateways = num_gateways
    router.loads.reserve("before", idlest, 10_000, 9.0 - age_s)
    router.loads.release("before")
    return router


def test_gateways_that_cannot_see_each_others_requests_do_not_all_send_to_who_was_idle() -> None:
    def spread(num_gateways: int, age_s: float) -> Counter[str]:
        return Counter(
            chosen(gateway(str(salt), num_gateways, "c", age_s), fresh(f"r{salt}", 10), 10.0).member
            for salt in range(200)
        )

    assert spread(1, 0.25) == {"c": 200}
    assert spread(8, 0.0) == {"c": 200}  # what is told is true
    seen = spread(8, 0.25)
    assert set(seen) == set("abcd")
    assert max(seen.values()) == seen["c"] < 100


def test_what_may_be_in_flight_unseen_is_less_than_a_prefix_that_is_worth_more() -> None:
    for salt in range(50):
        router, prompt = gateway(str(salt), 8, "c", 0.25), prompt_of("r1", list(range(4001)))
        router.index.add_blocks("a", prompt.names[SIZE])
        assert chosen(router, prompt, 10.0).member == "a"


def test_one_request_is_sent_to_the_same_member_by_the_same_gateway_every_time() -> None:
    for number in range(20):
        choices = {chosen(gateway("salt", 8, "b", 0.25), fresh(f"r{number}"), 10.0) for _ in range(3)}
        assert len(choices) == 1
