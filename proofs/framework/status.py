"""Writes the status of all proofs into `proofs/README.md` from `proofs/results/*.json`: nothing is typed.

python -m proofs.framework.status           rewrite what stands between the marks
python -m proofs.framework.status --check   exit 1 if something would change

Rows are counted of current records only: one is of an older build where what it speaks of has changed since.
"""

import re
import sys
from collections.abc import Collection
from functools import partial

from benchmarks.tables import Results, Writers, not_yet, results, table, write
from proofs.framework.builds import Record, older_sections
from proofs.framework.proof import REPORTED

PAGES = ("proofs/README.md",)
OLDER = "older build"


def of_proofs(found: Results) -> dict[str, Record]:
    """The records of proofs among all results."""
    return {name: record for name, record in found.items() if name.startswith("proof-")}


def summary(found: Results, older: Collection[str]) -> str:
    """One row for each record, and what the current ones amount to."""
    records = of_proofs(found)
    if not records:
        return _not_yet()
    current = [record for name, record in records.items() if name not in older]
    rows = [
        (
            f"[{name}](results/{name}.json)",
            record["date"],
            f"`{record['commit'][:10]}`",
            *((OLDER, "-") if name in older else (f"{len(record['figures'])}", f"{len(record['broken'])}")),
        )
        for name, record in records.items()
    ]
    num_rows, num_broken = (sum(len(record[key]) for record in current) for key in ("figures", "broken"))
    total = f"{len(current)} of {len(records)} records are current: {num_rows} rows, {num_broken} do not hold."
    return f"{table(('record', 'run of', 'commit', 'rows', 'do not hold'), rows)}\n\n{total}"


def broken(found: Results, older: Collection[str]) -> str:
    """Every bound that a committed run did not keep."""
    records = of_proofs(found)
    rows = [
        (f"[{name}](results/{name}.json)", f"`{key}`", _figure(record, key), _bound(record, key), run)
        for name, record in records.items()
        for run in (f"{record['date']}, {OLDER}" if name in older else record["date"],)
        for key in record["broken"]
    ]
    if not records:
        return _not_yet()
    header = ("record", "key", "figure", "bound", "run of")
    return table(header, rows) if rows else "In the committed records every bound holds."


def every_row(found: Results) -> str:
    """A table for each record: every key, its figure, its bound, and whether it holds."""
    parts = []
    for name, record in of_proofs(found).items():
        keys = [*record["figures"], *(key for key in record["broken"] if key not in record["figures"])]
        rows = [(f"`{key}`", _figure(record, key), _bound(record, key), _verdict(record, key)) for key in keys]
        parts.append(f"### {name}\n\n{table(('key', 'figure', 'bound', 'holds'), rows)}")
    return "\n\n".join(parts) or _not_yet()


def _figure(record: Record, key: str) -> str:
    value = record["figures"].get(key)
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value is None else f"{value:,.3f}".rstrip("0").rstrip(".")


def _bound(record: Record, key: str) -> str:
    """Records of runs before bounds were recorded do not say what their figures were held to."""
    return str(record["bounds"].get(key, REPORTED)) if record.get("bounds") else "not in the record"


def _verdict(record: Record, key: str) -> str:
    """What is held to nothing neither holds nor breaks."""
    if key in record["broken"]:
        return "no"
    if not record.get("bounds"):
        return "not broken"
    return "yes" if key in record["bounds"] else "-"


def _not_yet() -> str:
    return not_yet("make proof-NAME SCALE=full")


def older_on(page: str) -> list[str]:
    """Which records a page shows as of an older build. Any commit may add one, so a page is judged by its own list."""
    return re.findall(rf"^\| \[(proof-[a-z]+)\].*\| {OLDER} \|", page, re.MULTILINE)


def writers(older: Collection[str]) -> Writers:
    """Of the page, where the records of these names are of an older build."""
    return {"summary": partial(summary, older=older), "broken": partial(broken, older=older), "rows": every_row}


if __name__ == "__main__":
    sys.exit(write(PAGES, writers([name for name, record in of_proofs(results()).items() if older_sections(record)])))
