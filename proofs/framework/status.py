"""Writes the status of all proofs into `proofs/README.md` from `proofs/results/*.json`.

python -m proofs.framework.status           rewrite the text between the marks of the page
python -m proofs.framework.status --check   exit 1 if the text would change

Only rows of current records are counted. A record is of an older build once code that it covers has changed.
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


def proof_records(all_results: Results) -> dict[str, Record]:
    """The records of proofs among all results."""
    return {name: record for name, record in all_results.items() if name.startswith("proof-")}


def summary(all_results: Results, older: Collection[str]) -> str:
    """One row for each record, and the totals of the current ones."""
    records = proof_records(all_results)
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


def broken(all_results: Results, older: Collection[str]) -> str:
    """One row for each bound that a recorded run did not keep."""
    records = proof_records(all_results)
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


def every_row(all_results: Results) -> str:
    """A table for each record: every key, its figure, its bound, and whether it holds."""
    parts = []
    for name, record in proof_records(all_results).items():
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
    """The bound of a figure in words; the oldest records have no bounds."""
    return str(record["bounds"].get(key, REPORTED)) if record.get("bounds") else "not in the record"


def _verdict(record: Record, key: str) -> str:
    """Whether a figure keeps its bound; a figure without a bound is not judged."""
    if key in record["broken"]:
        return "no"
    if not record.get("bounds"):
        return "not broken"
    return "yes" if key in record["bounds"] else "-"


def _not_yet() -> str:
    return not_yet("make proof-NAME SCALE=full")


def older_on(page: str) -> list[str]:
    """The records that a page shows as of an older build. A test checks the page with these: any commit may add one."""
    return re.findall(rf"^\| \[(proof-[a-z]+)\].*\| {OLDER} \|", page, re.MULTILINE)


def writers(older: Collection[str]) -> Writers:
    """The writers of the page's parts, where the records of these names are of an older build."""
    return {"summary": partial(summary, older=older), "broken": partial(broken, older=older), "rows": every_row}


if __name__ == "__main__":
    sys.exit(write(PAGES, writers([name for name, one in proof_records(results()).items() if older_sections(one)])))
