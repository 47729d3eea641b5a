"""The page of proofs says what the records say, every row of them."""

import re
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.record import PROOF_RESULTS, ROOT
from proofs.framework import status

RECORD: dict[str, Any] = {"commit": "0123456789abcdef", "date": "2026-01-02"}
RESULTS: dict[str, Any] = {
    "peers": RECORD,
    "proof-doors": {
        **RECORD,
        "figures": {"goodput": 0.762452, "rejected": 1204, "survived": True},
        "bounds": {"goodput": "at least 0.95", "survived": "it answers"},
        "broken": ["goodput", "auth: broke off"],
    },
    "proof-old": {**RECORD, "figures": {"ops": 20_000_000, "slow": 2.5}, "broken": ["slow"]},
}


OLDER = ("proof-old",)
WRITERS = status.writers(OLDER)


def page(name: str) -> str:
    return f"before\n<!-- figures: {name} -->\nstale words\n<!-- end of figures -->\nafter\n"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("summary", "| [proof-doors](results/proof-doors.json) | 2026-01-02 | `0123456789` | 3 | 2 |"),
        ("summary", "| [proof-old](results/proof-old.json) | 2026-01-02 | `0123456789` | older build | - |"),
        ("summary", "1 of 2 records are current: 3 rows, 2 do not hold."),
        ("broken", "| [proof-doors](results/proof-doors.json) | `goodput` | 0.762 | at least 0.95 | 2026-01-02 |"),
        (
            "broken",
            "| [proof-old](results/proof-old.json) | `slow` | 2.5 | not in the record | 2026-01-02, older build |",
        ),
        ("rows", "| `goodput` | 0.762 | at least 0.95 | no |"),
        ("rows", "| `rejected` | 1,204 | reported | - |"),
        ("rows", "| `survived` | true | it answers | yes |"),
        ("rows", "| `auth: broke off` | - | reported | no |"),
        ("rows", "| `ops` | 20,000,000 | not in the record | not broken |"),
        ("rows", "| `slow` | 2.5 | not in the record | no |"),
    ],
)
def test_what_stands_between_the_marks_is_written_from_the_records(name: str, told: str) -> None:
    written = tables.filled(page(name), RESULTS, WRITERS)
    assert told in written
    assert "stale words" not in written
    assert "peers" not in written
    assert tables.filled(written, RESULTS, WRITERS) == written


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_not_proved_yet_says_how(name: str) -> None:
    assert "Not measured yet; `make proof-NAME" in tables.filled(page(name), {}, WRITERS)


def test_the_page_says_so_where_every_bound_holds() -> None:
    kept = {"proof-doors": {**RESULTS["proof-doors"], "broken": []}}
    assert status.broken(kept, ()) == "In the committed records every bound holds."


@pytest.mark.parametrize("name", status.PAGES)
def test_the_page_says_what_the_records_say(name: str) -> None:
    content = (ROOT / name).read_text()
    shown = status.writers(status.older_on(content))
    assert tables.filled(content, tables.results(), shown) == content, "run: make tables"


def test_the_page_shows_every_row_of_every_record_and_no_record_that_is_not_committed() -> None:
    content = (ROOT / "proofs" / "README.md").read_text()
    records = tables.results(PROOF_RESULTS)
    for name, record in records.items():
        part = content.partition(f"### {name}\n")[2].partition("\n### ")[0]
        for key in (*record["figures"], *record["broken"]):
            assert f"| `{key}` |" in part, "run: make tables"
    assert set(re.findall(r"results/([a-z-]+)\.json", content.partition("## Status")[2])) == set(records)


def test_every_proof_has_a_module_a_target_and_a_row_on_the_page() -> None:
    makefile, content = (ROOT / "Makefile").read_text(), (ROOT / "proofs" / "README.md").read_text()
    target = re.compile(r"^proof-(\w+):.*\n\t\$\(PYTHON\) -m proofs\.([\w.]+) \$\(PROVE\)$", re.MULTILINE)
    targets = dict(target.findall(makefile))
    assert set(re.findall(r"^proof-(\w+):", makefile, re.MULTILINE)) == {*targets, "all"}
    assert set(re.findall(r"proof-(\w+)", makefile.partition("\nproof-all: ")[2].partition("  ##")[0])) == {*targets}
    for name, module in targets.items():
        name_of_file = module.replace(".", "/")
        path = (
            f"{name_of_file}.py" if (ROOT / "proofs" / f"{name_of_file}.py").exists() else f"{name_of_file}/__main__.py"
        )
        assert f'run("{name}"' in (ROOT / "proofs" / path).read_text()
        assert re.search(rf"^\| `proof-{name}` \|.*\({path}\)", content, re.MULTILINE)
