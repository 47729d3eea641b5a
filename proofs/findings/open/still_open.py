"""Section `findings_open`: runs the reproduction of every finding of the second review; each must show no defect.

The findings are attacks, A1 to A11 and B, and defects that a user met in the first hour, H. The reproduction of a
finding is a function that returns a message about the defect; empty, if it is fixed. Some findings have a section of
this proof instead of a function: they are open if rows of that section are missing or broken.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.record import say
from proofs.findings.open import at_servers as open_at_servers
from proofs.findings.open import in_commands as open_in_commands
from proofs.findings.open import in_readers as open_in_readers
from proofs.findings.open.at_servers import Servers
from proofs.framework.proof import Proof, section

ROWS = {
    "A4 a model is taken from its users": (
        "model_taken_s",
        "model_wait_over_s",
        "model_taken_unequal",
        "model_held_over_s",
    ),
    "H1 bars that never end": ("lines_glued", "idle_bytes"),
    "H5 a long prompt looks like a hang": ("stale_s", "still_s"),
    "H6 a healthy server is restarting": ("ready_flips", "false_restarts"),
}
"""Findings that other sections reproduce, and the rows of these sections."""
WITHOUT_SERVERS: Sequence[Callable[[Path], str]] = (*open_in_readers.ITEMS, *open_in_commands.ITEMS)
WITH_SERVERS: Sequence[Callable[[Servers], str]] = open_at_servers.ITEMS


@dataclass(frozen=True, slots=True)
class Item:
    """One finding, and a message about its defect; empty: it is fixed."""

    name: str
    defect: str


def name_of(reproduction: Callable[..., str]) -> str:
    """The first line of the function's docstring."""
    return (reproduction.__doc__ or reproduction.__name__).splitlines()[0].rstrip(".")


def from_rows(proof: Proof) -> list[Item]:
    """The findings that other sections reproduce, judged by the rows of this run, or else by those of the record."""
    before = proof.before or {"figures": {}, "broken": []}
    figures = before["figures"] | proof.figures
    broken = {*proof.broken, *(key for key in before["broken"] if key not in proof.figures)}
    return [
        Item(name, ", ".join(f"{key} is broken or was not run" for key in keys if key not in figures or key in broken))
        for name, keys in ROWS.items()
    ]


@section("findings_open")
def still_open(proof: Proof) -> None:
    items = from_rows(proof) if proof.is_full else []
    for reproduction in WITHOUT_SERVERS:
        with TemporaryDirectory(dir=proof.folder) as folder:
            items.append(Item(name_of(reproduction), reproduction(Path(folder))))
    with ExitStack() as stack:
        servers = Servers(proof.folder, stack)
        items += [Item(name_of(reproduction), reproduction(servers)) for reproduction in WITH_SERVERS]
    for item in items:
        say(f"    {'OPEN' if item.defect else 'fixed'}: {item.name}{': ' * bool(item.defect)}{item.defect}")
    proof.report("findings_run", len(items), "reproductions")
    proof.equals("findings_open", sum(bool(item.defect) for item in items), 0)
