"""Generates the tables of the documents from the committed results, and the help texts of commands.

    python -m benchmarks.tables           rewrite the text between the marks
    python -m benchmarks.tables --check   exit 1 if something would change

A document has the marks `<!-- figures: NAME -->` and `<!-- end of figures -->`; the text between is generated.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import capacity_figures, client_figures, cpu_figures
from benchmarks.record import PROOF_RESULTS, RESULTS, ROOT, wrapped

PAGES = (
    "README.md",
    "docs/guides/bench.md",
    "docs/guides/models.md",
    "docs/guides/peers.md",
    "docs/concepts/exactness.md",
    "docs/concepts/scale.md",
    "docs/concepts/speed.md",
)
MARKED = re.compile(r"(<!-- figures: ([a-z-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
PICTURES = ROOT / "docs" / "guides" / "img"
PEERS = {
    "vllm": "vLLM-CPU",
    "vllm_all_cores": "vLLM-CPU, all cores",
    "transformers": "transformers serve",
    "openvino": "OpenVINO GenAI",
    "openvino_float32": "OpenVINO GenAI, ours in float32",
    "llamacpp": "llama.cpp",
    "llamacpp_mixture": "llama.cpp, a mixture of experts",
}


Results = Mapping[str, Any]
Writers = Mapping[str, Callable[[Results], str]]
"""Functions that return a table from the results, by the table's name in the documents."""


def main() -> int:
    """Write the tables of the pages with measurements."""
    return write(PAGES, TABLES)


def write(pages: Sequence[str], writers: Writers) -> int:
    """Write the tables of these pages, or with `--check` only list pages whose tables are out of date."""
    parser = argparse.ArgumentParser(description="Write the tables of the documents.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something would change")
    arguments = parser.parse_args()
    stale = [page for page in pages if not _is_fresh(ROOT / page, writers, write=not arguments.check)]
    for page in stale:
        print(f"{'stale' if arguments.check else 'written'}: {page}")
    return 1 if arguments.check and stale else 0


def _is_fresh(path: Path, writers: Writers, *, write: bool) -> bool:
    before = path.read_text()
    after = filled(before, results(), writers)
    if write and after != before:
        path.write_text(after)
    return before == after


def results(*folders: Path) -> dict[str, Any]:
    """Return all committed results of measurements and proofs by name."""
    paths = [path for folder in folders or (RESULTS, PROOF_RESULTS) for path in sorted(folder.glob("*.json"))]
    return {path.stem: json.loads(path.read_text()) for path in paths}


def filled(page: str, found: Results, writers: Writers | None = None) -> str:
    """Return the page with new text between all marks."""
    known = TABLES if writers is None else writers
    return MARKED.sub(lambda mark: f"{mark[1]}{known[mark[2]](found)}\n{mark[3]}", page)


def peers(found: Results) -> str:
    """Figures of quire over those of each peer."""
    record = found.get("peers")
    if record is None:
        return not_yet("make peers")
    rows = []
    for name, peer in record["peers"].items():
        for key, one in peer["figures"].items():
            between = f"{one['between'][0]:.2f} to {one['between'][1]:.2f}"
            figures = (f"{one['ours']:,.1f}", f"{one['theirs']:,.1f}", f"{one['ratio']:.2f}", between)
            rows.append((PEERS[name], f"`{key}`", *figures, _bound(key, record)))
    header = ("peer", "figure", "ours", "theirs", "ours / theirs", "over the rounds", "bound")
    return "\n".join((table(header, rows), "", *(_made(one, PEERS[name]) for name, one in record["peers"].items())))


def better(found: Results) -> str:
    """A list of figures in which a peer is better."""
    record = found.get("peers")
    if record is None:
        return not_yet("make peers")
    lines = []
    for name, peer in record["peers"].items():
        for key, one in peer["figures"].items():
            is_worse = one["ratio"] > 1 if "_ttft_" in key else one["ratio"] < 1
            if is_worse:
                lines.append(f"- {PEERS[name]}, `{key}`: ours is {one['ratio']:.2f} times theirs.")
    return "\n".join(lines) or "In no figure of the last run."


def proof(found: Results) -> str:
    """The figures of the proof of the benchmark."""
    record = found.get("proof-bench")
    if record is None:
        return not_yet("make proof-bench SCALE=full")
    rows = [(f"`{key}`", f"{value:,.3f}".rstrip("0").rstrip(".")) for key, value in record["figures"].items()]
    return f"{table(('figure', 'value'), rows)}\n\n{_made(record, 'quire')}"


def claims(found: Results) -> str:
    """A few figures for the README."""
    records = (found.get(name, {"figures": {}}) for name in ("proof-native", "proof-bench"))
    figures = {key: figure for record in records for key, figure in record["figures"].items()}
    rows = [(text, figures[key]) for key, text in CLAIMS.items() if key in figures]
    if not rows:
        return not_yet("make proof-bench SCALE=full")
    header = ("SmolLM2-135M in float32, two CPU cores", "times")
    return table(header, [(text, f"{figure:.1f}") for text, figure in rows])


def engine(found: Results) -> str:
    """Speed of the engine by batch size."""
    record = found.get("engine")
    if record is None:
        return not_yet("make bench")
    rows = [
        (
            str(one["batch"]),
            f"{one['output_tokens_per_s']:,.0f}",
            f"{one['speedup']:.1f}",
            f"{one['decode_tokens_per_s']:,.0f}",
            "-" if one["roof_share"] is None else f"{one['roof_share']:.0%}",
        )
        for one in record["batches"]
    ]
    header = ("requests at once", "output tokens/s", "times one alone", "decoding alone, tokens/s", "of the roof")
    prefix = (
        f"Prefill: {record['prefill_tokens_per_s']:,.0f} tokens/s. First token of {record['load']['prefix_tokens']:,} "
        f"shared and 32 own tokens: {record['miss_ttft_ms']:,.0f} ms cold, {record['hit_ttft_ms']:,.0f} ms cached."
    )
    return f"{table(header, rows)}\n\n{prefix}\n\n{_picture('engine')}{_made(record, record['model'])}"


def sweep(found: Results) -> str:
    """Speed of the server by number of clients."""
    record = found.get("sweep")
    if record is None:
        return not_yet("make bench")
    names = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
    rows = [
        (str(one["max_concurrency"]), *("-" if one[name] is None else f"{one[name]:,.0f}" for name in names))
        for one in record["points"]
    ]
    header = ("clients", "output tokens/s", "first token p50, ms", "p99", "each further token p50, ms", "p99")
    return f"{table(header, rows)}\n\n{_picture('sweep')}{_made(record, record['model'])}"


def fits(_found: Results) -> str:
    """What fits in how much memory; computed, not measured."""
    from benchmarks.fits import HEADER, fit_rows  # noqa: PLC0415 - imports the CPU backend

    return table(HEADER, list(fit_rows()))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


def of_proof(
    name: str, words: Mapping[str, str], make_table: Callable[[Sequence[str], Sequence[Sequence[str]]], str] = table
) -> Callable[[Results], str]:
    """Return a function that writes a table of these rows of a proof."""

    def write_table(found: Results) -> str:
        record = found.get(name)
        rows = cpu_figures.rows_of(record, words) if record is not None else []
        if record is None or not rows:
            return not_yet(f"make {name} SCALE=full")
        text = make_table(("", "bound", "measured"), rows)
        return "\n".join((text, "", *cpu_figures.circumstances_of(record)))

    return write_table


def sets(found: Results) -> str:
    """Speed of the coder model on every instruction set that could be forced on the recorded machine."""
    record = found.get("proof-cpu")
    rows = [] if record is None else cpu_figures.sets_of(record)
    if record is None or not rows:
        return not_yet('make proof-cpu SCALE=full ONLY="sets"')
    return "\n".join((table(rows[0], rows[1:]), "", *cpu_figures.circumstances_of(record)))


def help_of(*words: str) -> str:
    """The help text of a command."""
    from typer.testing import CliRunner  # noqa: PLC0415

    from quire import cli  # noqa: PLC0415

    text = CliRunner().invoke(cli.app, [*words, "--help"], prog_name="quire", terminal_width=100).stdout
    return f"```\n{text.rstrip()}\n```"


CLAIMS = {
    "speedup_16_vs_1": "output tokens/s of 16 requests at once over one at a time, in process, 32 tokens in, 128 out",
    "batching_speedup_16_32_128": "output tokens/s of 16 clients over one, through HTTP, 32 in, 128 out",
    "batching_speedup_16_256_64": "the same, 256 in, 64 out",
    "prefix_ttft_ratio": "first token of 1,024 shared and 32 own tokens: cold over cached",
}


def clients(found: Results) -> str:
    """The tested clients and their results."""
    record = found.get("proof-agents")
    rows = [*client_figures.rows_of(record)] if record is not None else []
    return table(client_figures.HEADER, rows) if rows else not_yet("make proof-agents SCALE=full")


TABLES: Writers = {
    "peers": peers,
    "better": better,
    "claims": claims,
    "proof-bench": proof,
    "engine": engine,
    "sweep": sweep,
    "fits": fits,
    "clients": clients,
    "cpu-speed": of_proof("proof-cpu", cpu_figures.SPEED),
    "cpu-sets": sets,
    "cpu-exact": of_proof("proof-cpu", cpu_figures.EXACT),
    "cpu-hold": of_proof("proof-cpu", cpu_figures.HOLD),
    "scale-fleets": of_proof("proof-capacity", capacity_figures.FLEETS, capacity_figures.plain_table),
    "scale-gateway": of_proof("proof-capacity", capacity_figures.GATEWAY, capacity_figures.plain_table),
    "help-serve": lambda _: help_of("bench", "serve"),
    "help-engine": lambda _: help_of("bench", "engine"),
}


def _bound(key: str, record: Mapping[str, Any]) -> str:
    if key in record["at_least"]:
        return f"at least {record['at_least'][key]:g}"
    return f"at most {record['at_most'][key]:g}" if key in record["at_most"] else ""


def _made(record: Mapping[str, Any], what: str) -> str:
    machine = record["machine"]
    machine_text = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    with_packages = f" with {', '.join(record['installed'])}" if record.get("installed") else ""
    prose = f"{what}: {record['date']}, commit {record['commit'][:10]}, {machine_text}{with_packages}."
    return "\n".join(wrapped(prose)) + "\n"


def _picture(name: str) -> str:
    """Return the link to a picture of the guides, if it exists."""
    return f"![{name}](img/{name}.png)\n\n" if (PICTURES / f"{name}.png").exists() else ""


def not_yet(command: str) -> str:
    return f"Not measured yet; `{command}` does."


if __name__ == "__main__":
    sys.exit(main())
