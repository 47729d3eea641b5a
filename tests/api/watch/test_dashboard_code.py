"""What the dashboard's own code makes of a stream: events however they are cut, pictures drawn by changes, figures."""

import base64
import json
import shutil
import subprocess
from collections import Counter
from itertools import groupby, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.workers.random_watch import RandomWatch

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "src" / "quire" / "api" / "dashboard"
PROBE = ROOT / "tests" / "support" / "dashboard_probe.mjs"
NODE = shutil.which("node")
LOOKS = range(6)

pytestmark = pytest.mark.skipif(NODE is None, reason="the page's code is run by node")


def run(*calls: tuple[str, Any]) -> list[Any]:
    """What each call of the page's code gives."""
    words = [str(NODE), str(PROBE), str(FOLDER)]
    ran = subprocess.run(words, input=json.dumps(calls), capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return list(json.loads(ran.stdout))


# -- the stream --------------------------------------------------------------------------------------------------------


def test_events_are_the_same_however_the_stream_is_cut() -> None:
    random = Random(5)
    text = ': keep-alive\n\nevent: snapshot\ndata: {"a": 1}\n\n' + "event: snapshot\r\ndata: x\r\ndata: y\r\n\r\n"
    text += "data: nameless\n\nevent: nothing\n\nevent: snapshot\ndata:tight\n\nevent: snapshot\ndata: cut off"
    cuts = [sorted(random.choices(range(len(text)), k=random.randint(0, 30))) for _ in range(200)]
    pieces = [[text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)] for cut in cuts]
    expected = [("snapshot", '{"a": 1}'), ("snapshot", "x\ny"), ("message", "nameless"), ("snapshot", "tight")]
    for given, told in zip(pieces, run(*[("events", one) for one in pieces]), strict=True):
        assert [(event["name"], event["data"]) for some in told for event in some] == expected, given


def test_waits_grow_to_a_bound_and_differ_between_pages() -> None:
    least, most = run(*[("waits", [at, 0]) for at in range(12)]), run(*[("waits", [at, 1]) for at in range(12)])
    assert least == sorted(least)
    assert most == sorted(most)
    assert most[0] < least[2] < most[-1] < 20
    assert all(b > 1.5 * a for a, b in zip(least, most, strict=True))


def snapshots(*numbers: int) -> str:
    return "".join(f'event: snapshot\ndata: {{"v": {one}}}\n\n' for one in numbers)


def test_a_stream_that_breaks_is_asked_for_again_and_each_failure_makes_the_wait_longer() -> None:
    (told,) = run(("listened", [None, 503, 500, None, snapshots(1, 2), None, snapshots(3) + "event: snap", 401]))
    assert told["heard"] == [{"v": 1}, {"v": 2}, {"v": 3}]
    assert set(map(tuple, told["keys"])) == {("/v1/admin/watch?model=a%20model", "Bearer secret")}
    assert told["told"][-1] == "refused 401"
    assert len(told["keys"]) == 8
    # Waits are cut into seconds, so that the page can count them down: what lies between two questions is one of them.
    lost = [sum(1 for _ in some) for is_lost, some in groupby(told["told"], lambda one: one == "lost") if is_lost]
    assert lost[:4] == sorted(lost[:4])
    assert lost[3] > lost[0]
    assert lost[4] <= lost[1], "a snapshot came, so the waits begin anew"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_who_is_refused_does_not_ask_again(status: int) -> None:
    (told,) = run(("listened", [status]))
    assert told["told"] == ["connecting", f"refused {status}"]
    assert not told["waits"]


# -- the map -----------------------------------------------------------------------------------------------------------


def test_all_cells_of_any_pool_fit_into_any_box_and_are_as_large_as_they_can_be() -> None:
    random = Random(6)
    given = [
        [random.choice((1, 2, 17, 300, 20_000, 32_768, random.randint(1, 32_768))), random.randint(280, 3_000), 400, 22]
        for _ in range(400)
    ]
    for (count, width, height, most), told in zip(given, run(*[("layout", one) for one in given]), strict=True):
        size, columns, rows = told["size"], told["columns"], told["rows"]
        assert 1 <= size <= most
        assert columns * rows >= count > columns * (rows - 1)
        assert size * columns <= width
        assert size * rows <= height
        larger = size + 1
        fits = larger <= most and larger * -(-count // max(1, width // larger)) <= height
        assert not fits


def test_a_map_drawn_change_by_change_is_the_map_drawn_at_once() -> None:
    random = Random(7)
    cases = []
    for _ in range(40):
        count, size = random.randint(1, 300), random.randint(1, 9)
        columns = random.randint(1, count)
        frames = [[random.randrange(6) | random.randrange(32) << 3 for _ in range(count)]]
        for _ in range(8):
            changes = {random.randrange(count): random.randrange(256) & ~7 | random.randrange(6) for _ in range(3)}
            frames.append([changes.get(at, cell) for at, cell in enumerate(frames[-1])])
        only = [random.choice((None, None, 0, 3)) for _ in frames]
        shape = {"size": size, "columns": columns, "rows": -(-count // columns)}
        cases.append({"frames": [*frames, frames[-1]], "shape": shape, "only": [*only, only[-1]]})
    for told in run(*[("drawn", one) for one in cases]):
        assert {(one["unequal"], one["outside"]) for one in told} == {(0, 0)}


def test_states_can_be_told_apart_without_their_colours_once_a_cell_has_ten_pixels() -> None:
    sprites = run(*[("sprite", [look, 10]) for look in LOOKS])
    # Held by one is the solid one, so what is left must all have a pattern.
    assert len({tuple(one) for one in sprites}) == len(LOOKS)


def test_what_a_byte_says_is_read_as_it_was_written() -> None:
    cells = bytes(state | references << 3 for state in LOOKS for references in range(32))
    (told,) = run(("decode", base64.b64encode(cells).decode()))
    assert [(state, references) for state, references, _ in told] == [(cell & 7, cell >> 3) for cell in cells]
    shared = {references: look for state, references, look in told if state == 3}
    assert [*Counter(shared[at] for at in range(2, 32)).values()] == [2, 4, 8, 16]


def test_every_block_of_a_cell_is_found_in_it() -> None:
    given = [[cell, per_cell] for cell in (0, 1, 32_767) for per_cell in (1, 2, 64)]
    for (cell, per_cell), told in zip(given, run(*[("numbers", one) for one in given]), strict=True):
        assert told == [1 + cell * per_cell, cell]


# -- the tree ----------------------------------------------------------------------------------------------------------


def random_nodes(random: Random, count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": at,
            "parent": random.randrange(-1, at) if at else -1,
            "num_tokens": random.randint(1, 500),
            "num_references": random.choice((0, 0, 1, 2, 40)),
            "depth": 0,
            "cache_group": None,
        }
        for at in range(count)
    ]


def test_branches_lie_behind_their_parents_and_over_no_others() -> None:
    random = Random(8)
    trees = [random_nodes(random, random.randint(0, 60)) for _ in range(100)]
    trees.append(RandomWatch(3, 600, 12).snapshot()["tree"]["nodes"])
    for nodes, told in zip(trees, run(*[("branches", one) for one in trees]), strict=True):
        places = told["places"]
        assert len(places) == len(nodes)
        for node, place in zip(nodes, places, strict=True):
            assert place["end"] - place["start"] == node["num_tokens"]
            if node["parent"] >= 0:
                over = places[node["parent"]]
                assert place["start"] == over["end"]
                assert over["top"] - 1e-9 <= place["top"]
                assert place["top"] + place["height"] <= over["top"] + over["height"] + 1e-9
        for inside in [told["roots"], *told["children"]]:
            lying = sorted((places[at]["top"], places[at]["height"]) for at in inside)
            assert all(a + height <= b + 1e-9 for (a, height), (b, _) in pairwise(lying))
        if nodes:
            assert sum(places[at]["height"] for at in told["roots"]) == pytest.approx(1)


def test_requests_of_one_row_follow_each_other_and_none_in_the_window_is_missing() -> None:
    random, given = Random(9), list[tuple[list[dict[str, Any]], int]]()
    for _ in range(60):
        lives = [sorted(random.sample(range(1000), 3)) for _ in range(random.randint(0, 80))]
        requests: list[dict[str, Any]] = [
            {"request_id": at, "segments": [["waiting", a, b], ["answering", b, random.choice((c, c, None))]]}
            for at, (a, b, c) in enumerate(lives)
        ]
        given.append((requests, random.randrange(1000)))
    for (requests, from_s), told in zip(given, run(*[("lanes", one) for one in given]), strict=True):
        spans = {one["request_id"]: (one["segments"][0][1], one["segments"][-1][2] or 9_999) for one in requests}
        assert {one["request"]["request_id"] for one in told["placed"]} == {
            name for name, (_, end) in spans.items() if end > from_s
        }
        for row in range(told["numRows"]):
            lying = sorted(spans[one["request"]["request_id"]] for one in told["placed"] if one["row"] == row)
            assert lying
            assert all(end <= start for (_, end), (start, _) in pairwise(lying))


# -- what is remembered ------------------------------------------------------------------------------------------------


def told_of(watch: RandomWatch, *, is_first: bool, since: int) -> dict[str, Any]:
    return {**watch.snapshot(is_first=is_first, since_step=since), "isFirst": is_first}


def test_steps_and_the_hour_go_on_through_snapshots_and_begin_again_with_a_new_stream() -> None:
    watch, snapshots, since = RandomWatch(4, 300, 6), [], 0
    for at in range(60):
        watch.run(2.5)
        snapshots.append(told_of(watch, is_first=at in (0, 40), since=since if at != 40 else watch.step - 7))
        since = watch.step
    (told,) = run(("kept", snapshots))
    last = told[-1]
    assert last["steps"] == [*range(watch.step - len(last["steps"]) + 1, watch.step + 1)]
    assert len(told[39]["steps"]) == 400
    assert len(told[40]["steps"]) == 7
    assert last["history"] == [row["at_s"] for row in watch.history if row["at_s"] > watch.now_s - 3600]
    assert all(one["outputRate"] is not None and 0 <= one["hitRate"] <= 1 and one["firstToken_s"] > 0 for one in told)


def test_the_rate_is_of_the_last_seconds_and_no_counter_that_began_again_makes_it_negative() -> None:
    watch = RandomWatch(5, 300, 6)
    base = told_of(watch, is_first=True, since=0)
    outputs = [0, 100, 200, 300, 10, 20, 30]
    snapshots = [
        {**base, "isFirst": not at, "at_s": float(at), "totals": {**base["totals"], "num_output_tokens": output}}
        for at, output in enumerate(outputs)
    ]
    (told,) = run(("kept", snapshots))
    assert [one["outputRate"] for one in told[1:4]] == [100, 100, 100]
    assert [one["outputRate"] for one in told[5:]] == [10, 10]


def test_a_new_workers_steps_follow_those_of_the_one_before() -> None:
    base = told_of(RandomWatch(6, 300, 6), is_first=True, since=0)
    before = [{"step": at, "at_s": 100.0 + at} for at in range(1, 6)]
    after = [{"step": at, "at_s": 200.0 + at} for at in range(1, 4)]
    snapshots = [{**base, "isFirst": not at, "steps": some} for at, some in enumerate((before, after, []))]
    (told,) = run(("kept", snapshots))
    assert told[1]["steps"] == told[2]["steps"] == [1, 2, 3, 4, 5, 1, 2, 3]


# -- words -------------------------------------------------------------------------------------------------------------


def test_figures_are_short_and_keep_their_units() -> None:
    cases = {
        ("whole", 12_345): "12,345",
        ("whole", None): "\u2013",
        ("short", 9_999): "9,999",
        ("short", 12_345): "12.3K",
        ("percent", 0.784): "78%",
        ("percent", 0.0123): "1.2%",
        ("percent", 0): "0%",
        ("span", 0.0312): "31 ms",
        ("span", 1.5): "1.50 s",
        ("span", 90): "90 s",
        ("span", 3_000): "50 min",
        ("ago", 0.2): "now",
        ("ago", 30): "30 s ago",
        ("roundUp", 256): 300,
        ("roundUp", 0): 1,
        ("ticks", 4_752, 5): [0, 1000, 2000, 3000, 4000],
    }
    assert run(*[("words", [*case]) for case in cases]) == [*cases.values()]
