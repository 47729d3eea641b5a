"""`quire bench`: numbers people can trust, of any OpenAI-compatible server. Tables on stderr, one JSON object last."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.bench.setup import LoadSetup
from quire.cli.bench.flags import Asking, with_asking, with_load
from quire.cli.shared.settings_flags import with_settings
from quire.config import Settings
from quire.verdicts import THRESHOLD

if TYPE_CHECKING:
    from quire.bench.compare import Comparison

bench_app = typer.Typer(rich_markup_mode=None)
URL_HELP = "Root of the server, such as http://localhost:8000."
SAVE_HELP = "Write the result to this file as well."
PROFILE_HELP = "Time steps of all kinds, write what they cost here for `quire sim` (JSON), and do nothing else."
PLOT_HELP = "Draw a picture (PNG); needs the extra `plot`."
SERVE_EPILOG = """\
\b
The table goes to stderr, the result as one JSON object to stdout; its keys are
those of `vllm bench serve`.
\b
Examples:
  quire bench serve --url http://localhost:8000 --concurrency 16
  quire bench serve --url http://localhost:8000 --workload agents --prompts chat
  quire bench serve --url http://localhost:8000 --rate 4 --goodput ttft:500 --goodput tpot:60
  quire bench serve --url http://localhost:8000 --trace conversation_trace.jsonl --speedup 10
"""
SWEEP_EPILOG = """\
\b
Example:
  quire bench sweep --url http://localhost:8000 --clients 1,2,4,8,16,32 --plot curve.png
"""
AB_EPILOG = """\
\b
Rounds are taken interleaved, so that both servers see the same weather; each round
has prompts of its own. The exit code is 1 if B is slower.
\b
Example:
  quire bench ab --a http://localhost:8000 --b http://localhost:8001 --save result.json
writes result.a.json and result.b.json, which `quire bench compare` reads.
"""
COMPARE_EPILOG = """\
\b
The exit code is 1 if B is slower, 3 if the two cannot be compared: files of
different runs, machines or loads.
\b
Example:
  quire bench compare result.a.json result.b.json
"""
ENGINE_EPILOG = """\
\b
Example:
  quire bench engine model.gguf --memory 6GiB --batches 1,4,16,64
"""
NOT_COMPARABLE_CODE = 3


@bench_app.command(epilog=SERVE_EPILOG)
@with_asking
@with_load
def serve(
    setup: LoadSetup,
    asking: Asking,
    url: Annotated[str, typer.Option("--url", "--base-url", help=URL_HELP)],
    save: Annotated[Path | None, typer.Option(help=SAVE_HELP)] = None,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="Save every request, too.")] = False,
    plot: Annotated[Path | None, typer.Option(help=f"{PLOT_HELP} Shows when each request ran.")] = None,
) -> None:
    """Put one load on a server and say how it did."""
    server = asking.server(url)
    from quire.bench import records as report
    from quire.bench import runs
    from quire.bench.event_loop import finished
    from quire.cli.bench.progress import show_run

    with show_run() as told:
        record, run = finished(runs.run_load(server, runs.seeded(setup), asking.wishes(), told))
    _print_rows(("what", "how much"), report.rows(record))
    _print_rows(("milliseconds", "mean", "median", "90%", "99%"), report.latency_rows(record))
    if "by_kind" in record:
        header = ("class", "requests", "tokens/s", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99")
        _print_rows(header, report.kind_rows(record))
    if save is not None:
        report.save(save, {**record, **report.detailed(run)} if save_detailed else record)
    _print_json(record)
    if plot is not None:
        from quire.bench import plots

        plots.timeline(plot, run, f"{_headline(record)}\n{record['model_id']}")
    if not record["completed"]:
        first = next(iter(run.outcomes)).detail or "nothing was said"
        typer.echo(f"error: no request was answered; the first was told: {first}", err=True)
        raise typer.Exit(1)


@bench_app.command(epilog=SWEEP_EPILOG)
@with_asking
@with_load
def sweep(
    setup: LoadSetup,
    asking: Asking,
    url: Annotated[str, typer.Option("--url", "--base-url", help=URL_HELP)],
    clients: Annotated[str, typer.Option(help="How many clients, with commas between.")] = "1,2,4,8,16,32",
    save: Annotated[Path | None, typer.Option(help=SAVE_HELP)] = None,
    plot: Annotated[Path | None, typer.Option(help=f"{PLOT_HELP} Throughput and latency by clients.")] = None,
) -> None:
    """Measure with more and more clients: what throughput costs in latency. Each asks as often as with `serve`."""
    server, counts = asking.server(url), _numbers(clients, "--clients")
    from quire.bench import records as report
    from quire.bench import runs
    from quire.bench.event_loop import finished
    from quire.cli.bench.progress import show_run

    with show_run() as told:
        points = finished(runs.sweep_clients(server, runs.seeded(setup), counts, asking.wishes(), told))
    header = ("clients", "tokens/s", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "failed")
    _print_rows(header, report.point_rows(points))
    result = {"sweep": "concurrency", "points": points}
    if save is not None:
        report.save(save, result)
    _print_json(result)
    if plot is not None:
        from quire.bench import plots

        plots.curve(plot, {points[0]["model_id"]: points}, "Throughput and latency by clients")


@bench_app.command(epilog=AB_EPILOG)
@with_asking
@with_load
def ab(
    setup: LoadSetup,
    asking: Asking,
    a: Annotated[str, typer.Option("--a", help="Root of the server to compare with.")],
    b: Annotated[str, typer.Option("--b", help="Root of the server in question.")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each; a verdict needs 7.")] = 10,
    save: Annotated[Path | None, typer.Option(help="Write NAME.a.json and NAME.b.json.")] = None,
    threshold: Annotated[float, typer.Option(min=0.0, help="Smallest change that counts.")] = THRESHOLD,
) -> None:
    """Measure two servers interleaved in one run, and say whether they differ."""
    servers = (asking.server(a), asking.server(b))
    from quire.bench import records as report
    from quire.bench import runs
    from quire.bench.compare import compare_records as judge
    from quire.bench.event_loop import finished
    from quire.cli.bench.progress import show_run

    with show_run() as told:
        sides = finished(runs.interleaved_servers(servers, runs.seeded(setup), rounds, asking.wishes(), told))
    if save is not None:
        stem = save.with_suffix("") if save.suffix == ".json" else save
        for side, record in zip("ab", sides, strict=True):
            report.save(stem.with_name(f"{stem.name}.{side}.json"), record)
    _print_verdict(judge(*sides, threshold))


@bench_app.command(epilog=COMPARE_EPILOG)
def compare(
    a: Annotated[Path, typer.Argument(help="Side A of a run of `quire bench ab`.")],
    b: Annotated[Path, typer.Argument(help="Side B of the same run.")],
    threshold: Annotated[float, typer.Option(min=0.0, help="Smallest change that counts.")] = THRESHOLD,
) -> None:
    """Say whether B differs from A, and by how much, with the noise of the rounds beside it."""
    from quire.bench import records as report
    from quire.bench.compare import compare_records as judge

    _print_verdict(judge(report.read_record(a), report.read_record(b), threshold))


@bench_app.command(epilog=ENGINE_EPILOG)
@with_settings
def engine(
    settings: Settings,
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, or a hub id.")],
    batches: Annotated[str, typer.Option(help="How many requests at once, with commas between.")] = "1,2,4,8,16,32,64",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 32,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Shared tokens for hit against miss; 0: skip.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all batches; medians are told.")] = 3,
    roof: Annotated[bool, typer.Option(help="Compare with the machine's own speed.")] = True,
    save: Annotated[Path | None, typer.Option(help=SAVE_HELP)] = None,
    plot: Annotated[Path | None, typer.Option(help=f"{PLOT_HELP} Tokens/s by batch.")] = None,
    profile: Annotated[Path | None, typer.Option(help=PROFILE_HELP)] = None,
) -> None:
    """Measure the engine in this process: what batching gives, what the prefix cache gives, how near the roof."""
    from quire.bench import records as report
    from quire.bench.engine import EngineBench, EngineLoad
    from quire.checkpoints.progress import show_progress

    if profile is not None:
        _measure_profile(settings, model, rounds, profile)
        return
    load = EngineLoad(tuple(_numbers(batches, "--batches")), prompt_tokens, output_tokens, prefix_tokens, rounds, roof)
    with show_progress() as progress:
        bench = EngineBench.opened(model, settings, load, progress)
    with bench:
        result = bench.run(lambda line: typer.echo(line, err=True))
    _print_rows(("batch", "tokens/s", "over one", "step ms", "roof ms", "of the roof"), result.batch_rows())
    _print_rows(("what", "how much"), result.rows())
    if save is not None:
        report.save(save, result.record())
    _print_json(result.record())
    if plot is not None:
        from quire.bench import plots

        plots.batch_plot(plot, result.record())


def _measure_profile(settings: Settings, model: str, rounds: int, path: Path) -> None:
    """Time steps of all kinds and write what they cost."""
    import json
    from dataclasses import asdict, replace

    from quire.bench.engine import EngineBench, EngineLoad
    from quire.bench.machine_info import machine
    from quire.checkpoints.progress import show_progress

    # A guess makes rows whose number nobody can foresee: a profile is of steps without.
    settings = replace(settings, model=replace(settings.model, speculation="off"))
    load = EngineLoad((1,), 1, 2, 0, rounds, has_roof=False)
    with show_progress() as progress:
        bench = EngineBench.opened(model, settings, load, progress)
    with bench:
        typer.echo("steps of all kinds ...", err=True)
        profile = bench.profile(Path(model).name)
    typer.echo(f"half of the steps it was not made of are within {profile.relative_error:.1%}", err=True)
    record = {**profile.as_json(), "settings": asdict(settings.model), "machine": machine()}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    _print_json(record)


def _headline(record: dict[str, Any]) -> str:
    ttft = record["median_ttft_ms"]
    told = "" if ttft is None else f", first token after {ttft:,.0f} ms"
    return f"{record['completed']:,} requests, {record['output_throughput']:,.0f} output tokens/s{told}"


def _numbers(text: str, flag: str) -> list[int]:
    from quire.errors import ConfigError

    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{flag} takes whole numbers from 1 with commas between, {text!r} given")
    return numbers


def _print_verdict(comparison: "Comparison") -> None:
    from dataclasses import asdict

    from quire.verdicts import SpeedVerdict, change_rows

    if comparison.changes:
        header = ("figure", "A", "B", "change", "between", "noise", "verdict")
        _print_rows(header, change_rows(comparison.changes))
    typer.echo(f"{comparison.verdict.value}{f': {comparison.reason}' if comparison.reason else ''}", err=True)
    _print_json(asdict(comparison))
    if comparison.verdict is SpeedVerdict.SLOWER:
        raise typer.Exit(1)
    if comparison.verdict is SpeedVerdict.NOT_COMPARABLE:
        raise typer.Exit(NOT_COMPARABLE_CODE)


def _print_rows(header: tuple[str, ...], rows: Any) -> None:
    from quire.cli.shared.columns import columns

    typer.echo(columns(header, rows, right=frozenset(range(1, len(header)))) + "\n", err=True)


def _print_json(content: Any) -> None:
    import json

    typer.echo(json.dumps(content))
