"""The page of a plan: one file that asks nothing of any host, with axes, units and names beside lines."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from quire.sim.fleet.report import FleetReport, MemberMetrics, Spread
from quire.sim.planning.curves import CurvePoint, PlanCurves
from quire.sim.planning.effects import SettingEffect
from quire.sim.planning.objectives import LatencyObjective
from quire.sim.planning.page import PlanResult, plan_page
from quire.sim.planning.planning import CapacityPlan, Minimum, Trial
from quire.sim.planning.svg_plots import Plot, PlotLine, PlotMark, nice_ticks, svg_plot
from quire.sim.planning.watched_latencies import LoadFacts
from quire.verdicts import SpeedVerdict, change_of

SPREAD = Spread(1.0, 2.0, 3.0, 4.0)
REPORT = FleetReport(9, 0, 0, 0, 0, 0, 9, 0, 9, 1.0, SPREAD, SPREAD, (MemberMetrics(0, 9, 9, 0.5),), "")
CURVES = PlanCurves(
    (CurvePoint(10.0, 2, 10, 1.0, 0.5, 1.0, 2.0, 1.1, 0.7), CurvePoint(20.0, 2, 20, 1.0)),
    (CurvePoint(0.5, 2, 10, 0.5, 0.5, 1.0, 2.0, 1.1, 0.7), CurvePoint(2.0, 2, 10, 2.0)),
    (CurvePoint(2.0, 2, 10, 1.0, 0.5, 1.0, 2.0, 1.1, 0.7),),
)


def result(*, is_met: bool = True, name: str = "trace") -> PlanResult:
    trials = (Trial(1, 10, False, None), Trial(2, 10, is_met, REPORT))
    least = Minimum(2 if is_met else None, REPORT, 1, REPORT, trials, is_monotone=False)
    pool = Minimum(10, REPORT, 8, REPORT, trials, is_monotone=True) if is_met else None
    limits = () if is_met else ("members are busy",)
    facts = LoadFacts(9, 9, 100, 4.0, 1, ("normal",))
    plan = CapacityPlan(facts, 5, least, pool, 2 if is_met else None, 10 if is_met else None, limits)
    change = change_of("mean_ttft_ms", -1, [(100.0, 120.0)] * 8)
    effects = (
        SettingEffect(
            "block size", "4 tokens", "8 tokens", SpeedVerdict.SLOWER, (change,) if change else (), 8, 0.5, 0.4
        ),
        SettingEffect("head starts", "some", "none", SpeedVerdict.NOT_COMPARABLE, reason="one class"),
    )
    objective = LatencyObjective.parse("ttft_p95=2s")
    return PlanResult(name, objective, "by hand", True, (("policy", "cost"),), plan, effects, CURVES)


def drawn_of(plot: Plot) -> ElementTree.Element:
    return ElementTree.fromstring(svg_plot(plot))  # noqa: S314 - our own


class Tags(HTMLParser):
    """Every tag with its attributes; open ones are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("is_met", [True, False])
def test_the_page_is_whole_and_asks_nothing_of_any_host(is_met: bool) -> None:
    page = plan_page(result(is_met=is_met))
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in tags.seen}
    assert not any(key in ("src", "href", "srcset") or key.startswith("on") for _, attrs in tags.seen for key in attrs)
    assert not re.search(r"https?:|//|@import|url\(", page)
    assert "prefers-color-scheme:dark" in page
    assert 'name="viewport"' in page


def test_it_tells_the_answer_the_cost_of_one_less_and_the_verdicts() -> None:
    page = plan_page(result())
    for words in (
        "2 members with 10 KV blocks each",
        "One less: 1 member: TTFT p95 is 3 s",
        ": not measured.",
        "More is not always better here",
        "+20.0%",
        "slower",
        "not comparable: one class",
        "TTFT, s",
        "size of the pool, blocks",
        "most work over mean",
        "stopped early",
    ):
        assert words in page, words
    assert "No tried configuration meets the objective" in plan_page(result(is_met=False))


def test_names_of_files_cannot_write_into_the_page() -> None:
    page = plan_page(result(name='<script>alert(1)</script>&"'))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_lines_differ_by_marker_and_dash_and_have_their_names_beside_them() -> None:
    plot = Plot("both", "x", "y, s", [1.0, 2.0, 100.0], [PlotLine("one", [1, 2, 3]), PlotLine("two", [3, 2, None])])
    drawn = drawn_of(plot)
    lines = drawn.findall("polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [3, 2]
    assert lines[0].attrib.get("stroke-dasharray") != lines[1].attrib.get("stroke-dasharray")
    assert len(drawn.findall("circle")) == 3
    assert len(drawn.findall("rect")) == 2
    assert {"one", "two", "x", "y, s"} <= {text.text for text in drawn.findall("text")}


def test_names_of_lines_that_end_together_do_not_lie_on_each_other() -> None:
    plot = Plot("", "x", "y", [1.0, 2.0], [PlotLine("one", [1, 2]), PlotLine("two", [1, 2]), PlotLine("three", [1, 2])])
    drawn = drawn_of(plot)
    places = sorted(float(text.attrib["y"]) for text in drawn.findall("text") if text.text in ("one", "two", "three"))
    assert places[1] - places[0] >= 12
    assert places[2] - places[1] >= 12


def test_one_point_nothing_and_marks_can_be_drawn() -> None:
    for plot in (
        Plot("", "x", "y", [5.0], [PlotLine("one", [0.0])]),
        Plot("", "x", "y", [5.0, 6.0], [PlotLine("one", [None, None])], gap_words="given up"),
        Plot(
            "", "x", "y", [5.0, 6.0], [PlotLine("one", [1, 2])], [PlotMark("here", 5.5), PlotMark("so much", 9, True)]
        ),
    ):
        drawn_of(plot)


def test_ticks_are_round_numbers_from_zero_that_reach_the_highest() -> None:
    assert nice_ticks(17.65) == [0, 5, 10, 15, 20]
    assert nice_ticks(1.0) == [0, 0.5, 1.0]
    assert nice_ticks(0.0)[0] == 0
    for highest in (0.003, 0.9, 4.0, 7.2, 99.0, 12_345.0):
        ticks = nice_ticks(highest)
        assert ticks[0] == 0
        assert ticks[-1] >= highest > ticks[-2]
        assert 3 <= len(ticks) <= 6
