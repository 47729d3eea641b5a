"""`quire bench`: measure an OpenAI-compatible server or quire's engine. Tables go to stderr, JSON to stdout."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.bench import plots, records, runs
from quire.bench.compare import Comparison, compare_records
from quire.bench.setup import LoadSetup
from quire.cli.bench.flags import ServerFlags
from quire.cli.bench.progress import show_run
from quire.cli.shared.columns import columns
from quire.cli.shared.flags import with_fields, with_settings
from quire.config import Settings
from quire.errors import ConfigError
from quire.verdicts import THRESHOLD, SpeedVerdict, change_rows

bench_app = typer.Typer(rich_markup_mode=None)
URL_HELP = "Root URL of the server, such as http://localhost:8000."
SAVE_HELP = "Write the result to this file as well."
PROFILE_HELP = "Time steps of all kinds, write the profile for `quire sim` to this file (JSON), and exit."
PLOT_HELP = "Draw a plot (PNG); needs the extra `plot`."
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
Rounds are interleaved, so that both servers run under the same conditions; each round
has its own prompts. The exit code is 1 if B is slower.
\b
Example:
  quire bench ab --a http://localhost:8000 --b http://localhost:8001 --save result.json
writes result.a.json and result.b.json, which `quire bench compare` reads.
"""
COMPARE_EPILOG = """\
\b
The exit code is 1 if B is slower, 3 if the two cannot be compared: files from
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
@with_fields(ServerFlags)
@with_fields(LoadSetup)
def serve(
    setup: LoadSetup,
    server_flags: ServerFlags,
    url: Annotated[str, typer.Option("--url", "--base-url", help=URL_HELP)],
    save: Annotated[Path | None, typer.Option(help=SAVE_HELP)] = None,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="Also save every request.")] = False,
    plot: Annotated[Path | None, typer.Option(help=f"{PLOT_HELP} Shows when each request ran.")] = None,
) -> None:
    """Run one load against a server and report the results."""
    server = server_flags.server(url)
    with show_run() as listener:
        record, run = runs.run_async(runs.run_load(server, runs.seeded(setup), server_flags.options(), listener))
    _print_rows(("metric", "value"), records.rows(record))
    _print_rows(("milliseconds", "mean", "median", "90%", "99%"), records.latency_rows(record))
    if "by_kind" in record:
        header = ("class", "requests", "tokens/s", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99")
        _print_rows(header, records.kind_rows(record))
    if save is not None:
        records.save(save, {**record, **records.per_request_data(run)} if save_detailed else record)
    _print_json(record)
    if plot is not None:
        plots.timeline(plot, run, f"{_headline(record)}\n{record['model_id']}")
    if not record["completed"]:
        first = next(iter(run.outcomes)).detail or "no error message"
        typer.echo(f"error: no request succeeded; the first failed with: {first}", err=True)
        raise typer.Exit(1)


@bench_app.command(epilog=SWEEP_EPILOG)
@with_fields(ServerFlags)
@with_fields(LoadSetup)
def sweep(
    setup: LoadSetup,
    server_flags: ServerFlags,
    url: Annotated[str, typer.Option("--url", "--base-url", help=URL_HELP)],
    clients: Annotated[str, typer.Option(help="Numbers of clients, comma-separated.")] = "1,2,4,8,16,32",
    save: Annotated[Path | None, typer.Option(help=SAVE_HELP)] = None,
    plot: Annotated[Path | None, typer.Option(help=f"{PLOT_HELP} Throughput and latency by number of clients.")] = None,
) -> None:
    """Measure throughput and latency with more and more clients. Each sends requests as often as with `serve`."""
    server, counts, options = server_flags.server(url), _counts(clients, "--clients"), server_flags.options()
    with show_run() as listener:
        points = runs.run_async(runs.sweep_clients(server, runs.seeded(setup), counts, options, listener))
    header = ("clients", "tokens/s", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "failed")
    _print_rows(header, records.point_rows(points))
    result = {"sweep": "concurrency", "points": points}
    if save is not None:
        records.save(save, result)
    _print_json(result)
    if plot is not None:
        plots.curve(plot, points, "Throughput and latency by clients")


@bench_app.command(epilog=AB_EPILOG)
@with_fields(ServerFlags)
@with_fields(LoadSetup)
def ab(
    setup: LoadSetup,
    server_flags: ServerFlags,
    a: Annotated[str, typer.Option("--a", help="Root URL of the baseline server.")],
    b: Annotated[str, typer.Option("--b", help="Root URL of the server to compare with it.")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per server; a verdict needs 7.")] = 10,
    save: Annotated[Path | None, typer.Option(help="Write NAME.a.json and NAME.b.json.")] = None,
    threshold: Annotated[float, typer.Option(min=0.0, help="Smallest change that counts.")] = THRESHOLD,
) -> None:
    """Measure two servers interleaved in one run, and report whether they differ."""
    servers = (server_flags.server(a), server_flags.server(b))
    with show_run() as listener:
        options = server_flags.options()
        sides = runs.run_async(runs.measure_interleaved(servers, runs.seeded(setup), rounds, options, listener))
    if save is not None:
        stem = save.with_suffix("") if save.suffix == ".json" else save
        for side, record in zip("ab", sides, strict=True):
            records.save(stem.with_name(f"{stem.name}.{side}.json"), record)
    _print_verdict(compare_records(*sides, threshold))


@bench_app.command(epilog=COMPARE_EPILOG)
def compare(
    a: Annotated[Path, typer.Argument(help="Result of side A of a run of `quire bench ab`.")],
    b: Annotated[Path, typer.Argument(help="Result of side B of the same run.")],
    threshold: Annotated[float, typer.Option(min=0.0, help="Smallest change that counts.")] = THRESHOLD,
) -> None:
    """Report whether B differs from A, by how much, and the noise of the rounds."""
    _print_verdict(compare_records(records.read_record(a), records.read_record(b), threshold))


@bench_app.command(epilog=ENGINE_EPILOG)
@with_settings
def engine(
    settings: Settings,
    model: Annotated[str, typer.Argument(help="A directory, a .gguf file, or a hub id.")],
    batches: Annotated[str, typer.Option(help="Numbers of concurrent requests, comma-separated.")] = "1,2,4,8,16,32,64",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=2, help="Output tokens per request.")] = 32,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Shared tokens for cache hit and miss; 0: skip.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all batches; medians are reported.")] = 3,
    roof: Annotated[bool, typer.Option(help="Compare with the peak speed of the machine.")] = True,
    save: Annotated[Path | None, typer.Option(help=SAVE_HELP)] = None,
    plot: Annotated[Path | None, typer.Option(help=f"{PLOT_HELP} Tokens/s by batch size.")] = None,
    profile: Annotated[Path | None, typer.Option(help=PROFILE_HELP)] = None,
) -> None:
    """Measure the engine in this process: gains from batching and the prefix cache, distance to the roof."""
    from quire.bench.engine import EngineBench, EngineLoad
    from quire.checkpoints.progress import show_progress

    if profile is not None:
        _measure_profile(settings, model, rounds, profile)
        return
    load = EngineLoad(tuple(_counts(batches, "--batches")), prompt_tokens, output_tokens, prefix_tokens, rounds, roof)
    with show_progress() as progress:
        bench = EngineBench.open(model, settings, load, progress)
    with bench:
        result = bench.run(lambda line: typer.echo(line, err=True))
    _print_rows(("batch", "tokens/s", "speedup", "step ms", "roofline ms", "of roofline"), result.batch_rows())
    _print_rows(("metric", "value"), result.rows())
    if save is not None:
        records.save(save, result.record())
    _print_json(result.record())
    if plot is not None:
        plots.batch_plot(plot, result.record())


def _measure_profile(settings: Settings, model: str, rounds: int, path: Path) -> None:
    from quire.bench.engine import EngineBench, EngineLoad
    from quire.checkpoints.progress import show_progress

    # A profile measures steps without speculation, which makes the number of rows per step unpredictable.
    settings = replace(settings, model=replace(settings.model, speculation="off"))
    load = EngineLoad((1,), prompt_tokens=1, output_tokens=2, prefix_tokens=0, num_rounds=rounds, has_roof=False)
    with show_progress() as progress:
        bench = EngineBench.open(model, settings, load, progress)
    with bench:
        typer.echo("timing steps of all kinds ...", err=True)
        profile = bench.profile(Path(model).name)
    typer.echo(f"median error of the profile, over steps not used for the fit: {profile.relative_error:.1%}", err=True)
    record = {**profile.as_json(), "settings": asdict(settings.model), "machine": records.machine()}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    _print_json(record)


def _headline(record: dict[str, Any]) -> str:
    ttft = record["median_ttft_ms"]
    first_token = "" if ttft is None else f", first token after {ttft:,.0f} ms"
    return f"{record['completed']:,} requests, {record['output_throughput']:,.0f} output tokens/s{first_token}"


def _counts(text: str, flag: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"expected comma-separated whole numbers from 1 for {flag}, got {text!r}", (flag,))
    return numbers


def _print_verdict(comparison: "Comparison") -> None:
    if comparison.changes:
        header = ("metric", "A", "B", "change", "interval", "noise", "verdict")
        _print_rows(header, change_rows(comparison.changes))
    typer.echo(f"{comparison.verdict.value}{f': {comparison.reason}' if comparison.reason else ''}", err=True)
    _print_json(asdict(comparison))
    if comparison.verdict is SpeedVerdict.SLOWER:
        raise typer.Exit(1)
    if comparison.verdict is SpeedVerdict.NOT_COMPARABLE:
        raise typer.Exit(NOT_COMPARABLE_CODE)


def _print_rows(header: tuple[str, ...], rows: Any) -> None:
    typer.echo(columns(header, rows, right=frozenset(range(1, len(header)))) + "\n", err=True)


def _print_json(content: Any) -> None:
    typer.echo(json.dumps(content))
