"""Which models come and go: every rule as a property of a park that is played through, move by move."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from quire.api.park.park_moves import Moves, Parked, Stage, in_its_way, next_moves

MEMORY = 10
MIN_STAY_S = 5.0


def moves(*models: Parked, now_s: float = 100.0, memory_bytes: int = MEMORY) -> Moves:
    return next_moves(models, memory_bytes, MIN_STAY_S, now_s)


def here(name: str, needed_bytes: int = 5, **more: object) -> Parked:
    return replace(Parked(name, needed_bytes, Stage.HERE), **more)  # type: ignore[arg-type]


def test_a_model_that_is_asked_for_is_loaded_and_one_that_is_not_is_left_alone() -> None:
    assert moves(Parked("a", 5, waiting_since_s=1.0), Parked("b", 5)) == Moves(load=("a",))


def test_a_model_that_is_kept_is_loaded_before_all_others() -> None:
    late, early = Parked("a", 5, waiting_since_s=1.0), Parked("c", 5, waiting_since_s=0.5)
    found = moves(late, Parked("b", 5, is_kept=True), early)
    assert found.load == ("b", "c")


def test_of_those_that_nobody_uses_the_one_that_was_used_longest_ago_leaves() -> None:
    wanted = Parked("c", 5, waiting_since_s=90.0)
    assert moves(here("a", last_used_s=50.0), here("b", last_used_s=40.0), wanted).leave == ("b",)
    assert moves(here("a", last_used_s=50.0), here("b", last_used_s=40.0, num_users=1), wanted).leave == ("a",)
    assert moves(here("a", last_used_s=50.0, is_kept=True), here("b", last_used_s=60.0), wanted).leave == ("b",)


def test_if_all_are_used_one_takes_no_more_requests() -> None:
    wanted = Parked("c", 5, waiting_since_s=90.0)
    assert moves(here("a", last_used_s=50.0, num_users=2), here("b", last_used_s=40.0, num_users=1), wanted).leave == (
        "b",
    )


def test_whoever_has_just_come_stays_for_a_while() -> None:
    wanted = Parked("c", 5, waiting_since_s=90.0)
    found = moves(here("a", here_since_s=97.0), here("b", here_since_s=96.0), wanted)
    assert found == Moves(look_again_s=101.0)


def test_nobody_leaves_in_vain() -> None:
    wanted = Parked("c", 10, waiting_since_s=90.0)
    assert moves(here("a"), here("b", here_since_s=97.0), wanted) == Moves(look_again_s=102.0)
    assert moves(here("a"), here("b", stage=Stage.LOADING), wanted) == Moves()


def test_room_that_is_being_made_is_waited_for_and_kept_for_the_one_it_is_made_for() -> None:
    first, second = Parked("c", 5, waiting_since_s=80.0), Parked("d", 2, waiting_since_s=90.0)
    found = moves(here("a", 5, stage=Stage.LEAVING, num_users=1), here("b", 3), first, second)
    assert found == Moves()


def test_a_model_whose_room_nobody_needs_any_more_stays() -> None:
    leaving = here("a", stage=Stage.LEAVING, num_users=1)
    assert moves(leaving, here("b")) == Moves(stay=("a",))
    assert moves(replace(leaving, num_users=0), here("b")) == Moves()
    assert moves(replace(leaving, must_leave=True), here("b")) == Moves()


def test_a_model_that_nobody_uses_leaves_after_its_time() -> None:
    assert moves(here("a", idle_s=30.0, last_used_s=70.0)).leave == ("a",)
    assert moves(here("a", idle_s=30.0, last_used_s=80.0)) == Moves(look_again_s=110.0)
    assert moves(here("a", idle_s=30.0, last_used_s=70.0, num_users=1)) == Moves()
    assert moves(here("a", idle_s=30.0, last_used_s=70.0, is_kept=True)) == Moves()


def test_a_model_that_can_never_fit_is_passed_over() -> None:
    kept, small = here("k", 6, is_kept=True), Parked("s", 4, waiting_since_s=95.0)
    wanted = Parked("c", 5, waiting_since_s=90.0)
    assert in_its_way(wanted, [kept, small, wanted], MEMORY) == ["k"]
    assert in_its_way(replace(wanted, needed_bytes=11), [], MEMORY) == ["c"]
    assert in_its_way(replace(wanted, needed_bytes=4), [kept, small], MEMORY) == []
    assert moves(kept, small, wanted).load == ("s",)


@st.composite
def parks(draw: st.DrawFn) -> list[Parked]:
    sizes = draw(st.lists(st.integers(1, 6), min_size=2, max_size=5))
    kept = draw(st.integers(0, 1))
    return [Parked(str(at), size, is_kept=at < kept) for at, size in enumerate(sizes)]


class Game:
    """A park played through: requests come and end in any order, loading and leaving take any time."""

    def __init__(self, park: list[Parked]) -> None:
        self.models = {one.name: one for one in park}
        self.now_s = 0.0

    def move(self) -> None:
        found = next_moves([*self.models.values()], MEMORY, MIN_STAY_S, self.now_s)
        for name in found.load:
            assert self.models[name].stage is Stage.AWAY
            self.change(name, stage=Stage.LOADING)
        for name in found.leave:
            assert self.models[name].stage is Stage.HERE
            assert not self.models[name].is_kept
            self.change(name, stage=Stage.LEAVING)
        for name in found.stay:
            self.change(name, stage=Stage.HERE)
        assert sum(one.needed_bytes for one in self.models.values() if one.stage is not Stage.AWAY) <= MEMORY

    def advance(self, name: str) -> None:
        """What takes time goes on: a model arrives, a request ends, or a model that nobody uses is gone."""
        one, now_s = self.models[name], self.now_s
        if one.stage is Stage.LOADING:
            num_users = int(one.waiting_since_s is not None)
            self.change(name, stage=Stage.HERE, waiting_since_s=None, num_users=num_users)
            self.change(name, here_since_s=now_s, last_used_s=now_s)
        elif one.num_users and one.stage in (Stage.HERE, Stage.LEAVING):
            self.change(name, num_users=one.num_users - 1, last_used_s=now_s)
        elif one.stage is Stage.LEAVING:
            self.change(name, stage=Stage.AWAY)

    def ask(self, name: str) -> None:
        one = self.models[name]
        if one.stage is Stage.HERE:
            self.change(name, num_users=one.num_users + 1, last_used_s=self.now_s)
        elif one.waiting_since_s is None:
            self.change(name, waiting_since_s=self.now_s)

    def change(self, name: str, **to: object) -> None:
        self.models[name] = replace(self.models[name], **to)  # type: ignore[arg-type]


@given(parks(), st.data())
def test_however_it_is_used_memory_is_never_exceeded_nobody_is_cut_off_and_everybody_comes(
    park: list[Parked], data: st.DataObject
) -> None:
    game = Game(park)
    for _ in range(data.draw(st.integers(1, 30))):
        game.now_s += data.draw(st.sampled_from([0.0, 1.0, 10.0]))
        name = data.draw(st.sampled_from(sorted(game.models)))
        data.draw(st.sampled_from([game.ask, game.advance]))(name)
        game.move()
    # From here on nobody asks any more: whoever waits and can fit is served in the end.
    for _ in range(40 * len(game.models)):
        game.now_s += MIN_STAY_S
        for name in game.models:
            game.advance(name)
        game.move()
    for one in game.models.values():
        assert one.waiting_since_s is None or in_its_way(one, [*game.models.values()], MEMORY), game.models
