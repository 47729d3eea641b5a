"""Section `findings_open`: every reproduction of the second review of attacks and of a first hour, run as written.

Each item has one function, named after it, that returns what it still shows, or nothing. A1 to A11 and the lines of B
are attacks; H is the first hour's list. What other sections of this proof run as written (A3's neighbours, A4, bars,
long prompts) is not run twice: the item is open if the record has no such row, or if the row is broken.
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
"""Items that other sections run, and their rows."""
ALONE: Sequence[Callable[[Path], str]] = (*open_in_readers.ITEMS, *open_in_commands.ITEMS)
SERVED: Sequence[Callable[[Servers], str]] = open_at_servers.ITEMS


@dataclass(frozen=True, slots=True)
class Item:
    """One of the list, and what it shows; empty: nothing any more."""

    name: str
    shown: str


def name_of(item: Callable[..., str]) -> str:
    """The first line of its docstring."""
    return (item.__doc__ or item.__name__).splitlines()[0].rstrip(".")


def from_rows(proof: Proof) -> list[Item]:
    """Of those that other sections run: this run's rows, or the record's."""
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
    for alone in ALONE:
        with TemporaryDirectory(dir=proof.folder) as folder:
            items.append(Item(name_of(alone), alone(Path(folder))))
    with ExitStack() as stack:
        servers = Servers(proof.folder, stack)
        items += [Item(name_of(served), served(servers)) for served in SERVED]
    for item in items:
        say(f"    {'OPEN' if item.shown else 'shut'}: {item.name}{': ' * bool(item.shown)}{item.shown}")
    proof.report("findings_run", len(items), "reproductions")
    proof.equals("findings_open", sum(bool(item.shown) for item in items), 0)
