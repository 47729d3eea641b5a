"""`quire doctor`: print facts about this machine, faults, possible speed-ups, and a summary for a bug report."""

import json
from typing import Annotated

import typer

from quire.cli.shared.flags import with_chosen_settings
from quire.config import Settings

EPILOG = """\
\b
The exit code is 1 if something does not work.
\b
Examples:
  quire doctor
  quire doctor --port 8080
"""


@with_chosen_settings("host", "port", "keys_file", "instruction_set")
def doctor(
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Check this machine: what does not work, and what would make it faster."""
    from dataclasses import asdict

    from quire.cli.doctor.machine_facts import read_facts
    from quire.cli.doctor.machine_rules import advice_for, fact_rows, report_block
    from quire.cli.shared.columns import columns

    facts = read_facts(settings)
    advice = advice_for(facts)
    if as_json:
        report = {**asdict(facts), "abilities": sorted(facts.abilities), "advice": [asdict(item) for item in advice]}
        typer.echo(json.dumps(report))
    else:
        first, *rows = fact_rows(facts)
        typer.echo(columns(first, rows) + "\n")
        for item in advice:
            typer.echo(f"{'does not work' if item.is_fault else 'could be better'}: {item.what}\n  hint: {item.hint}")
        if not advice:
            typer.echo("no problems found")
        typer.echo("\nfor a report:\n")
        for line in report_block(facts, advice):
            typer.echo(f"    {line}")
    if any(item.is_fault for item in advice):
        raise typer.Exit(1)
