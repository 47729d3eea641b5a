"""Pictures are drawn, and say when they cannot be."""

import sys
from pathlib import Path

import pytest

from quire.bench import plots
from quire.bench.outcome import Run
from quire.errors import ConfigError
from tests.support.errors import raises_code
from tests.unit.bench.outcomes import outcome

POINTS = [
    {
        "max_concurrency": count,
        "output_throughput": 10.0 * count,
        **{f"{kind}_{name}_ms": 5.0 for kind in ("median", "p99") for name in ("ttft", "tpot")},
    }
    for count in (1, 2, 4)
]
BATCHES = [
    {"batch": count, "decode_tokens_per_s": 9.0 * count, "roof_tokens_per_s": 10.0 * count} for count in (1, 2, 4)
]
RUN = Run(0.0, 2.0, (outcome(0.0, [0.5, 2.0]), outcome(0.1, [], error="timeout"), outcome(0.2, [1.0])))


def is_picture(path: Path) -> bool:
    content = path.read_bytes()
    return content.startswith(b"\x89PNG") and len(content) > 10_000


def test_every_picture_is_drawn(tmp_path: Path) -> None:
    plots.curve(tmp_path / "curve.png", POINTS, "curve")
    plots.timeline(tmp_path / "new" / "timeline.png", RUN, "timeline")
    plots.batch_plot(tmp_path / "batches.png", {"model": "m", "batches": BATCHES})
    for name in ("curve.png", "new/timeline.png", "batches.png"):
        assert is_picture(tmp_path / name)


def test_a_timeline_of_very_many_requests_draws_some_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "MAX_ROWS", 2)
    plots.timeline(tmp_path / "many.png", RUN, "many")
    assert is_picture(tmp_path / "many.png")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with raises_code(ConfigError, "matplotlib_missing"):
        plots.timeline(tmp_path / "none.png", RUN, "none")


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises_code(ConfigError, "invalid_config"):
        plots.timeline(tmp_path / "file" / "x.png", RUN, "x")
