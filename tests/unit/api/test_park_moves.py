"""Which models come and go: every rule as a property of a park that is played through, move by move."""

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api.models.park_moves import (
    LOADS_S,
    MAX_LOADS,
    MAX_UNLOAD_DELAY_S,
    OPERATOR,
    Load,
    Loads,
    ModelState,
    Moves,
    Stage,
    Waiter,
    blocking_models,
    load_wait_s,
    next_moves,
)

MEMORY = 10
TURN_S = 30.0
TENANTS = ("t", "u", "v")


def moves(*models: ModelState, now_s: float = 100.0, memory_bytes: int = MEMORY, loads: Loads | None = None) -> Moves:
    return next_moves(models, memory_bytes, loads or {}, now_s)


def here(name: str, needed_bytes: int = 5, users: str = "", served: str = "vu", **more: object) -> ModelState:
    found = ModelState(name, needed_bytes, Stage.READY, users=frozenset(users), served=frozenset(served + users))
    return replace(found, **more)  # type: ignore[arg-type]


def wanted(name: str, since_s: float, needed_bytes: int = 5, tenant: str = "t", **more: object) -> ModelState:
    return replace(ModelState(name, needed_bytes), waiters=(Waiter(tenant, since_s),), **more)  # type: ignore[arg-type]


def test_a_model_that_is_asked_for_is_loaded_and_one_that_is_not_is_left_alone() -> None:
    assert moves(wanted("a", 1.0), ModelState("b", 5)) == Moves(load=Load("a", "t"))


def test_a_model_that_is_kept_is_loaded_before_all_others_and_at_nobodys_cost() -> None:
    found = moves(wanted("a", 1.0), ModelState("b", 5, is_kept=True), wanted("c", 0.5))
    assert found.load == Load("b", OPERATOR)


def test_a_tenant_that_waits_longest_is_first_and_behind_all_who_wait_once_a_model_was_loaded_for_it() -> None:
    many = (wanted("a", 1.0), wanted("b", 2.0), wanted("c", 50.0, tenant="v"))
    assert moves(*many).load == Load("a", "t")
    assert moves(*many, loads={"t": (40.0,)}).load == Load("a", "t")
    assert moves(*many, loads={"t": (60.0,)}).load == Load("c", "v")


def test_a_tenant_that_has_caused_its_loads_is_passed_over_until_it_may_again() -> None:
    loads = {"t": (50.0, 60.0, 70.0, 80.0)}
    assert moves(wanted("a", 1.0), wanted("b", 90.0, tenant="v"), loads=loads).load == Load("b", "v")
    assert moves(wanted("a", 1.0), loads=loads) == Moves(check_again_s=110.0)
    assert moves(wanted("a", 1.0), loads=loads, now_s=110.0).load == Load("a", "t")
    assert moves(wanted("a", 1.0, tenant=OPERATOR), loads={OPERATOR: loads["t"]}).load == Load("a", OPERATOR)


def test_what_a_tenant_waits_for_already_counts_as_loads_it_will_cause() -> None:
    assert load_wait_s("t", {}, 100.0, num_planned=3) == 0.0
    assert load_wait_s("t", {}, 100.0, num_planned=4) == LOADS_S
    assert load_wait_s("t", {"t": (30.0, 50.0, 90.0)}, 100.0, num_planned=1) == 0.0
    assert load_wait_s("t", {"t": (30.0, 50.0, 90.0)}, 100.0, num_planned=2) == 10.0
    assert load_wait_s("t", {"t": (30.0, 50.0, 90.0)}, 100.0, num_planned=3) == 50.0


def test_of_those_that_answer_nothing_the_one_that_was_used_longest_ago_leaves() -> None:
    want = wanted("c", 90.0)
    assert moves(here("a", last_used_s=50.0), here("b", last_used_s=40.0), want).unload == ("b",)
    assert moves(here("a", last_used_s=50.0), here("b", last_used_s=40.0, users="v"), want).unload == ("a",)
    assert moves(here("a", last_used_s=50.0, is_kept=True), here("b", last_used_s=60.0), want).unload == ("b",)


def test_then_one_that_answers_the_waiting_tenant_alone_then_any() -> None:
    want = wanted("c", 90.0)
    assert moves(here("a", users="v"), here("b", last_used_s=60.0, users="t"), want).unload == ("b",)
    assert moves(here("a", users="v"), here("b", last_used_s=60.0, users="tv"), want).unload == ("a",)


def test_a_model_serves_until_its_turn_ends_whoever_waits() -> None:
    found = moves(here("a", turn_ends_s=112.0), here("b", turn_ends_s=111.0, users="t"), wanted("c", 90.0))
    assert found == Moves(check_again_s=111.0)


def test_a_turn_that_no_other_tenant_uses_ends_early_when_no_answer_runs_a_few_times_a_minute() -> None:
    own = here("a", 10, served="t", turn_ends_s=120.0)
    assert moves(own, wanted("c", 90.0), loads={"t": (95.0,)}).unload == ("a",)
    assert moves(own, wanted("c", 90.0), loads={"t": (80.0, 85.0, 95.0)}) == Moves(check_again_s=120.0)
    assert moves(own, wanted("c", 90.0, tenant="v")) == Moves(check_again_s=120.0)
    assert moves(replace(own, users=frozenset("t")), wanted("c", 90.0)) == Moves(check_again_s=120.0)
    unused = here("a", 10, served="", turn_ends_s=120.0)  # who caused it has gone before it came
    assert moves(unused, wanted("c", 90.0), loads={"t": (85.0, 95.0)}).unload == ("a",)


def test_no_model_leaves_in_vain() -> None:
    want = wanted("c", 90.0, 10)
    assert moves(here("a"), here("b", turn_ends_s=102.0), want) == Moves(check_again_s=102.0)
    assert moves(here("a"), here("b", stage=Stage.LOADING), want) == Moves()


def test_room_that_is_being_made_is_waited_for_and_kept_for_the_one_it_is_made_for() -> None:
    first, second = wanted("c", 80.0), wanted("d", 90.0, 2, tenant="v")
    leaving = here("a", 5, stage=Stage.UNLOADING, users="v", unloading_since_s=90.0)
    assert moves(leaving, here("b", 3), first, second) == Moves(check_again_s=150.0)


def test_the_last_answers_hold_a_leaving_model_for_a_while_and_never_against_their_own_tenant() -> None:
    leaving, want = here("a", 10, stage=Stage.UNLOADING, unloading_since_s=50.0), wanted("c", 40.0)
    assert moves(replace(leaving, users=frozenset("v")), want) == Moves(check_again_s=110.0)
    assert moves(replace(leaving, users=frozenset("v")), want, now_s=110.0) == Moves(suspend=("a",))
    assert moves(replace(leaving, users=frozenset("tv")), want) == Moves(check_again_s=110.0)
    assert moves(replace(leaving, users=frozenset("t")), want) == Moves(suspend=("a",))
    assert moves(replace(leaving, users=frozenset("t"), is_unload_final=True), want) == Moves()
    aside = replace(want, waiters=(Waiter("t", 40.0, is_suspended=True),))
    assert moves(replace(leaving, users=frozenset("t")), aside) == Moves(check_again_s=110.0)
    assert moves(replace(leaving, users=frozenset("v"), must_unload=True), now_s=200.0) == Moves()


def test_a_model_whose_room_is_not_needed_any_more_stays() -> None:
    leaving = here("a", stage=Stage.UNLOADING, users="v")
    assert moves(leaving, here("b")) == Moves(keep=("a",))
    assert moves(replace(leaving, users=frozenset()), here("b")) == Moves()
    assert moves(replace(leaving, must_unload=True), here("b")) == Moves()
    assert moves(replace(leaving, is_unload_final=True), here("b")) == Moves()


def test_a_model_that_no_tenant_uses_leaves_after_its_time() -> None:
    assert moves(here("a", idle_s=30.0, last_used_s=70.0)).unload == ("a",)
    assert moves(here("a", idle_s=30.0, last_used_s=80.0)) == Moves(check_again_s=110.0)
    assert moves(here("a", idle_s=30.0, last_used_s=70.0, users="v")) == Moves()
    assert moves(here("a", idle_s=30.0, last_used_s=70.0, is_kept=True)) == Moves()


def test_a_model_that_can_never_fit_is_passed_over() -> None:
    kept, small = here("k", 6, is_kept=True), wanted("s", 95.0, 4)
    want = wanted("c", 90.0)
    assert blocking_models(want, [kept, small, want], MEMORY) == ["k"]
    assert blocking_models(replace(want, needed_bytes=11), [], MEMORY) == ["c"]
    assert blocking_models(replace(want, needed_bytes=4), [kept, small], MEMORY) == []
    assert moves(kept, small, want).load == Load("s", "t")


# -- played through ----------------------------------------------------------------------------------------------------


@st.composite
def parks(draw: st.DrawFn) -> list[ModelState]:
    sizes = draw(st.lists(st.integers(1, 6), min_size=2, max_size=5))
    kept = draw(st.integers(0, 1))
    return [ModelState(str(at), size, is_kept=at < kept) for at, size in enumerate(sizes)]


@dataclass
class Resident:
    """One model of a game."""

    size: int
    is_kept: bool
    stage: Stage = Stage.UNLOADED
    users: Counter[str] = field(default_factory=Counter)
    served: set[str] = field(default_factory=set)
    waiting: dict[str, float] = field(default_factory=dict)
    since_s: float = 0.0
    """When its stage began."""
    turn_ends_s: float = 0.0
    last_used_s: float = 0.0
    is_unload_final: bool = False


class Game:
    """A park played through: requests come, end and are cancelled in any order, loading and leaving take any time."""

    def __init__(self, park: list[ModelState]) -> None:
        self.models = {one.name: Resident(one.needed_bytes, one.is_kept) for one in park}
        self.now_s = 0.0
        self.loads: dict[str, tuple[float, ...]] = {}
        self.begun: list[tuple[float, str]] = []

    def parked(self, name: str) -> ModelState:
        one = self.models[name]
        aside = [Waiter(tenant, one.since_s, True) for tenant in one.users if one.stage is Stage.UNLOADED]
        return ModelState(
            name,
            one.size,
            one.stage,
            one.is_kept,
            users=frozenset(one.users),
            served=frozenset(one.served),
            waiters=(*(Waiter(tenant, since_s) for tenant, since_s in one.waiting.items()), *aside),
            turn_ends_s=one.turn_ends_s,
            unloading_since_s=one.since_s,
            last_used_s=one.last_used_s,
            is_unload_final=one.is_unload_final,
        )

    def move(self) -> None:
        while True:
            known = [self.parked(name) for name in self.models]
            found = next_moves(known, MEMORY, self.loads, self.now_s)
            self.check_leaving(found, known)
            for name in found.unload:
                self.enter(name, Stage.UNLOADING)
            for name in found.suspend:
                self.models[name].is_unload_final = True
            for name in found.keep:
                self.serve(name)
            if found.load is not None:
                self.begin_load(found.load)
            assert sum(one.size for one in self.models.values() if one.stage is not Stage.UNLOADED) <= MEMORY
            if not (found.load or found.unload):
                return

    def check_leaving(self, found: Moves, known: list[ModelState]) -> None:
        """A turn is taken from no tenant that uses it, and answers are set aside when it is time for it."""
        by_name = {one.name: one for one in known}
        for name in found.unload:
            one = by_name[name]
            assert one.stage is Stage.READY
            assert not one.is_kept
            assert one.turn_ends_s <= self.now_s or (not one.users and len(one.served) <= 1)
        for name in found.suspend:
            assert by_name[name].unloading_since_s + MAX_UNLOAD_DELAY_S <= self.now_s or len(by_name[name].users) == 1

    def begin_load(self, load: Load) -> None:
        assert self.models[load.name].stage is Stage.UNLOADED
        self.enter(load.name, Stage.LOADING)
        if load.tenant != OPERATOR:
            self.loads[load.tenant] = (*self.loads.get(load.tenant, ())[1 - MAX_LOADS :], self.now_s)
            self.begun.append((self.now_s, load.tenant))
            minute = [at_s for at_s, tenant in self.begun if tenant == load.tenant and at_s + LOADS_S > self.now_s]
            assert len(minute) <= MAX_LOADS

    def enter(self, name: str, stage: Stage) -> None:
        self.models[name].stage, self.models[name].since_s = stage, self.now_s

    def serve(self, name: str) -> None:
        one = self.models[name]
        self.enter(name, Stage.READY)
        one.users.update(dict.fromkeys(one.waiting, 1))
        one.waiting.clear()
        one.turn_ends_s, one.last_used_s, one.served = self.now_s + TURN_S, self.now_s, set(one.users)

    def advance(self, name: str, tenant: str) -> None:
        """What takes time goes on: a model arrives, an answer ends, or a model is gone."""
        one = self.models[name]
        if one.stage is Stage.LOADING:
            self.serve(name)
        elif one.stage is Stage.UNLOADING and (one.is_unload_final or not one.users):
            self.enter(name, Stage.UNLOADED)
            one.is_unload_final = False
        elif one.stage is not Stage.UNLOADED and one.users[tenant]:
            one.users[tenant] -= 1
            one.last_used_s = self.now_s
        one.users = +one.users

    def ask(self, name: str, tenant: str) -> None:
        one = self.models[name]
        if one.stage is Stage.READY:
            one.users[tenant] += 1
            one.served.add(tenant)
            one.last_used_s = self.now_s
        elif tenant not in one.waiting:
            one.waiting[tenant] = self.now_s

    def cancel(self, name: str, tenant: str) -> None:
        self.models[name].waiting.pop(tenant, None)


@given(parks(), st.data())
def test_however_it_is_used_memory_is_never_exceeded_turns_are_kept_and_everybody_comes(
    park: list[ModelState], data: st.DataObject
) -> None:
    game = Game(park)
    for _ in range(data.draw(st.integers(1, 40))):
        game.now_s += data.draw(st.sampled_from([0.0, 1.0, 10.0, 40.0]))
        name, tenant = data.draw(st.sampled_from(sorted(game.models))), data.draw(st.sampled_from(TENANTS))
        data.draw(st.sampled_from([game.ask, game.ask, game.advance, game.cancel]))(name, tenant)
        game.move()
    # From here on no request comes any more: each that waits and can fit is served in the end.
    for _ in range(60 * len(game.models)):
        if not any(game.parked(name).waiters for name in game.models):
            break
        game.now_s += 10.0
        for name in game.models:
            for tenant in TENANTS:
                game.advance(name, tenant)
        game.move()
    known = [game.parked(name) for name in game.models]
    for one in known:
        assert not one.waiters or blocking_models(one, known, MEMORY), game.models


LOAD_S = 4.0


@settings(max_examples=40)
@given(st.integers(2, 4), st.integers(0, 1 << 32))
def test_a_tenant_waits_for_one_turn_of_each_other_tenant_whatever_they_do(num_models: int, seed: int) -> None:
    """Memory for one model. Two tenants ask, hold and cancel as they like; the third one's wish is measured."""
    game = Game([ModelState(str(at), MEMORY) for at in range(num_models)])
    random, asked_s = Random(seed), None
    for second in range(500):
        game.now_s = float(second)
        for name, one in game.models.items():
            if (one.stage is Stage.LOADING and one.since_s + LOAD_S <= game.now_s) or one.stage is Stage.UNLOADING:
                game.advance(name, "v")
            game.models[name].users.pop("v", None)  # its answers are short
        for tenant in "tu":
            random.choice([game.ask, game.ask, game.advance, game.cancel])(random.choice([*game.models]), tenant)
        if second == 100:
            game.ask("0", "v")
            asked_s = game.now_s if "v" in game.models["0"].waiting else None
        game.move()
        if asked_s is not None and "v" not in game.models["0"].waiting:
            break
    else:
        assert asked_s is None
        return
    # The turn under way, one of each other tenant, and what each takes to come and to leave.
    assert game.now_s - asked_s <= 3 * (LOAD_S + TURN_S + MAX_UNLOAD_DELAY_S + 5) + LOAD_S
