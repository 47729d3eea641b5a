"""`quire replay`: run a trace through the real scheduler again and report the first difference."""

import json
from pathlib import Path
from typing import Annotated

import typer

EPILOG = "Example: quire serve model.gguf --trace trace.jsonl; quire replay trace.jsonl"


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A file written by quire serve --trace.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a trace through the real scheduler and KV memory again; exit with 1 if any plan differs.

    No model is run: the results of the device are in the trace. A truncated trace is replayed as far as it goes.
    """
    from quire import __version__
    from quire.checkpoints.progress import show_progress
    from quire.sim.replay.replay import replay as replay_trace

    with show_progress() as progress:
        report = replay_trace(trace, progress)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        for line in report.lines():
            typer.echo(line)
    other_versions = sorted({session.quire for session in report.sessions} - {__version__})
    if not report.is_same and other_versions:
        typer.echo(
            f"the trace is from quire {', '.join(other_versions)}, this is {__version__}: rules may differ", err=True
        )
    if not report.is_same:
        raise typer.Exit(1)
