"""The eighteen clients people already use, against a server whose model is a script: each calls a tool and ends.

Judged by what each of them did: the file it wrote, or the text it gave back. They are installed from npm and PyPI.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import say
from proofs.agents.clients_run.agents import ALL_AGENTS, Agent, AgentRuns
from proofs.agents.clients_run.libraries import LIBRARIES, Library, ask_library
from proofs.agents.clients_run.packages import GROUPS, NotInstalledError, PackageGroup, installed
from proofs.agents.clients_run.runs import Ground
from proofs.agents.clients_run.scripted_server import MODEL, running
from proofs.framework.proof import Proof, section

NUM_CLIENTS = 18
BY_TOOL = "called a tool and finished"


@dataclass(frozen=True, slots=True)
class ClientRow:
    """One client of the table."""

    title: str
    group: str
    package: str
    apis: str
    task: str
    """What it has to do."""
    try_out: Callable[[PackageGroup, Ground], str | None]
    """What went wrong, if something did."""

    @property
    def key(self) -> str:
        """Its figure's."""
        return "client_" + "_".join(self.title.lower().replace("/", "").replace("-", " ").split())

    @property
    def words(self) -> str:
        """What is held of it, its version first: the table of clients is made of this."""
        return f"{self.title} {GROUPS[self.group].version(self.package)}, {self.apis}: {self.task}"


def rows() -> Iterator[ClientRow]:
    """In the order of the table."""
    for agent in ALL_AGENTS:
        package, task = GROUPS[agent.group].package, BY_TOOL if agent.has_tools else "finished without tools"
        yield ClientRow(agent.title, agent.group, package, agent.apis, task, _of_agent(agent))
    for library in LIBRARIES:
        task = BY_TOOL if library.has_last_word else "called a forced tool"
        yield ClientRow(library.title, library.group, library.package, library.apis, task, _of_library(library))


def _of_agent(agent: Agent) -> Callable[[PackageGroup, Ground], str | None]:
    def try_out(group: PackageGroup, ground: Ground) -> str | None:
        desk = AgentRuns.opened(agent, group, ground)
        task, content = desk.write_task("hello.txt")
        return desk.problem(desk.ask(agent.asked(task)), "hello.txt", content)

    return try_out


def _of_library(library: Library) -> Callable[[PackageGroup, Ground], str | None]:
    return lambda group, ground: ask_library(library, group, ground)[1]


@section("clients")
def clients(proof: Proof) -> None:
    """All of them, one after the other, at one server."""
    failed, missing, num_tried = list[str](), list[str](), 0
    groups = {row.group: _had(row.group) for row in rows()}
    with running(proof.folder) as server:
        for at, row in enumerate(rows()):
            group = groups[row.group]
            if group is None:
                missing.append(row.title)
                continue
            num_tried += 1
            problem = row.try_out(group, Ground.made(_folder(proof, at), server.url, MODEL))
            if problem is not None:
                failed.append(row.title)
                say(f"    {row.title}: {problem}")
            proof.holds(row.key, problem is None, row.words)
    if missing:
        say(f"    not installed: {', '.join(missing)}")
    proof.report("clients_not_installed", len(missing))
    proof.at_least("clients_tried", num_tried, NUM_CLIENTS - len(missing))
    proof.equals("clients_failed", len(failed), 0)


def _had(name: str) -> PackageGroup | None:
    try:
        return installed(name)
    except NotInstalledError as error:
        say(f"    {error}")
        return None


def _folder(proof: Proof, at: int) -> Path:
    return proof.folder / f"client-{at}"
