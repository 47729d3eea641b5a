"""Tables in documents come from results."""

from typing import Any

import pytest

from benchmarks import tables
from benchmarks.record import ROOT

RECORD = {
    "commit": "0123456789abcdef",
    "date": "2026-01-02",
    "machine": {"processor": "CPU", "cores": 2, "memory_gib": 8.0},
}
FIGURE = {"ratio": 1.25, "between": [1.1, 1.4], "ours": 125.0, "theirs": 100.0, "rounds": 5}
RESULTS: dict[str, Any] = {
    "peers": {
        "at_least": {"vllm_8": 1.2},
        "at_most": {"vllm_ttft_8": 1.0},
        "peers": {"vllm": {**RECORD, "installed": ["torch==1"], "figures": {"vllm_8": FIGURE, "vllm_ttft_8": FIGURE}}},
    },
    "proof-bench": {
        **RECORD,
        "figures": {"prefix_ttft_ratio": 31.0, "client_overhead": 0.004, "same_build_no_difference": 1.0},
    },
    "sweep": {
        **RECORD,
        "model": "m",
        "points": [
            {
                "max_concurrency": 8,
                "output_throughput": 90.0,
                "median_ttft_ms": 70.0,
                "p99_ttft_ms": 80.0,
                "median_tpot_ms": None,
                "p99_tpot_ms": 9.0,
            }
        ],
    },
    "engine": {
        **RECORD,
        "model": "m",
        "load": {"prefix_tokens": 1024},
        "prefill_tokens_per_s": 600.0,
        "miss_ttft_ms": 1500.0,
        "hit_ttft_ms": 60.0,
        "batches": [
            {
                "batch": 4,
                "output_tokens_per_s": 80.0,
                "speedup": 3.0,
                "decode_tokens_per_s": 110.0,
                "roof_share": 0.8,
            }
        ],
    },
}


def agents_record() -> dict[str, Any]:
    words = "its task by a tool"
    return {
        **RECORD,
        "figures": {"client_claude_code": True, "client_llm": False, "turn2_reuse_claude_code": 0.998, "launches": 5},
        "bounds": {
            "client_claude_code": f"Claude Code 2.1.197, Messages: {words}",
            "client_llm": f"llm 0.36, chat, Responses: {words}",
            "launches": "5",
        },
    }


def test_clients_are_told_with_their_versions_and_what_they_did() -> None:
    written = tables.clients({"proof-agents": agents_record()})
    assert "| Claude Code 2.1.197 | Messages | its task by a tool | yes | 99.8% |" in written
    assert "| llm 0.36 | chat, Responses | its task by a tool | no |  |" in written
    assert len(written.splitlines()) == 4
    assert tables.clients({}) == "Not measured yet; `make proof-agents SCALE=full` does."


def page(name: str) -> str:
    return f"before\n<!-- figures: {name} -->\nstale words\n<!-- end of figures -->\nafter\n"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("peers", "| vLLM-CPU | `vllm_8` | 125.0 | 100.0 | 1.25 | 1.10 to 1.40 | at least 1.2 |"),
        ("better", "- vLLM-CPU, `vllm_ttft_8`: ours is 1.25 times theirs."),
        ("proof-bench", "| `client_overhead` | 0.004 |"),
        ("engine", "| 4 | 80 | 3.0 | 110 | 80% |"),
        ("sweep", "| 8 | 90 | 70 | 80 | - | 9 |"),
        ("help-serve", "--concurrency"),
    ],
)
def test_what_stands_between_the_marks_is_written_from_the_results(name: str, told: str) -> None:
    written = tables.filled(page(name), RESULTS)
    assert told in written
    assert "stale words" not in written
    assert written.startswith("before\n")
    assert written.endswith("<!-- end of figures -->\nafter\n")
    assert tables.filled(written, RESULTS) == written


@pytest.mark.parametrize("name", ["peers", "better", "claims", "proof-bench", "engine", "sweep"])
def test_what_was_not_measured_says_how_to_measure_it(name: str) -> None:
    assert "Not measured yet; `make" in tables.filled(page(name), {})


@pytest.mark.parametrize("name", tables.PAGES)
def test_the_documents_say_what_the_results_say(name: str) -> None:
    content = (ROOT / name).read_text()
    assert tables.filled(content, tables.results()) == content, "run: make tables"
