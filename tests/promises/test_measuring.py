"""What the pages tell of speed can be measured by whoever reads them, with `quire bench`; and it is what was recorded.

Ratios of a tiny model are not those of the page. What is held here is that the command measures each kind of figure,
that batching and the prefix cache give more than nothing, and that no figure of a page differs from its record.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import speed_figures, tables
from proofs.framework import status
from tests.promises.conftest import Served
from tests.promises.registry import ROOT

LOAD = ("--batches", "1,8", "--prompt-tokens", "48", "--output-tokens", "16", "--prefix-tokens", "416", "--rounds", "3")
SIZES = ("--memory", "2GiB", "--max-model-len", "512", "--threads", "1")


def bench(*words: str) -> str:
    around = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-m", "quire", "bench", *words], capture_output=True, text=True, env=around)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def in_float32(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    saved = tmp_path_factory.mktemp("bench") / "engine.json"
    bench("engine", str(tiny_model), *LOAD, *SIZES, "--save", str(saved))
    return dict(json.loads(saved.read_text()))


def test_what_batching_gives_in_process_can_be_measured(in_float32: dict[str, Any]) -> None:
    alone, together = in_float32["batches"]
    assert alone["batch"] == 1
    assert together["speedup"] > 1.0
    assert in_float32["prefill_tokens_per_s"] > 0


def test_what_the_prefix_cache_gives_can_be_measured(in_float32: dict[str, Any]) -> None:
    assert in_float32["prefix_ttft_ratio"] > 1.0


def test_how_near_the_roof_a_step_is_can_be_measured(in_float32: dict[str, Any]) -> None:
    for one in in_float32["batches"]:
        assert one["roof_share"] is None or (one["roof_share"] > 0 and one["bare_ms"] > 0)
    if any(one["roof_share"] is None for one in in_float32["batches"]):
        assert [note for note in in_float32["notes"] if note.startswith("no roof: ")], "it says why there is none"


@pytest.mark.parametrize("flags", [("--dtype", "bfloat16"), ("--kv-dtype", "bfloat16")], ids=["weights", "kv"])
def test_what_16_bits_give_can_be_measured(tiny_model: Path, tmp_path: Path, flags: tuple[str, str]) -> None:
    bench("engine", str(tiny_model), *LOAD, *SIZES, *flags, "--no-roof", "--save", str(tmp_path / "engine.json"))
    told = json.loads((tmp_path / "engine.json").read_text())
    assert [one["decode_tokens_per_s"] > 0 for one in told["batches"]] == [True, True]
    assert told["prefill_tokens_per_s"] > 0


def test_what_batching_gives_through_http_can_be_measured(served: Served, tmp_path: Path) -> None:
    words = ("--url", served.server.url, "--key", served.alice, "--model", "one", "--clients", "1,4")
    load = ("--prompt-tokens", "32", "--output-tokens", "24", "--requests", "16")
    bench("sweep", *words, *load, "--save", str(tmp_path / "sweep.json"))
    told = json.loads((tmp_path / "sweep.json").read_text())
    alone, together = told["points"]
    assert [(one["completed"] > 0, one["failed"]) for one in (alone, together)] == [(True, 0)] * 2
    assert alone["max_concurrent_requests"] == 1 < together["max_concurrent_requests"] <= 4
    # Which is larger depends on what else this machine does: the tiny model answers within a millisecond.
    assert min(one["output_throughput"] for one in (alone, together)) > 0


def test_the_figures_of_the_pages_are_those_of_the_records() -> None:
    for page in (*tables.PAGES, *status.PAGES):
        content = (ROOT / page).read_text()
        writers = tables.TABLES if page in tables.PAGES else status.writers(status.older_on(content))
        assert tables.filled(content, tables.results(), writers) == content, "run: make tables"
    page, record = speed_figures.PAGE.read_text(), speed_figures.read_record()
    assert speed_figures.with_table(page, record) == page, "run: python -m benchmarks.speed_figures"
