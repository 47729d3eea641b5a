"""The table of clients for the README, from the record of `make proof-agents`; untested clients are left out."""

from collections.abc import Iterator, Mapping
from typing import Any

CLIENT = "client_"
REUSE = "turn2_reuse_"
HEADER = ("client", "API", "task", "done", "cached, of the cacheable tokens")


def rows_of(record: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield a row for each client; its name comes from the bound: `Claude Code 2.1.197, Messages: ...`."""
    figures = record["figures"]
    for key, bound in record["bounds"].items():
        if not key.startswith(CLIENT):
            continue
        client_and_apis, _, task = bound.partition(": ")
        client, _, apis = client_and_apis.partition(", ")
        reuse = next((figures[REUSE + name] for name in _agents(figures) if key.startswith(CLIENT + name)), None)
        yield client, apis, task, "yes" if figures[key] else "no", "" if reuse is None else f"{reuse:.1%}"


def _agents(figures: Mapping[str, Any]) -> Iterator[str]:
    return (key.removeprefix(REUSE) for key in figures if key.startswith(REUSE))
