"""Eighteen published clients against a server whose model is a script: each must call a tool and end.

A client is judged by the file that it wrote or the text that it returned. Clients are installed from npm and PyPI.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import say
from proofs.agents.clients_run.agents import ALL_AGENTS, Agent, AgentRuns
from proofs.agents.clients_run.libraries import LIBRARIES, Library, ask_library
from proofs.agents.clients_run.packages import GROUPS, NotInstalledError, PackageGroup, installed
from proofs.agents.clients_run.runs import Workspace
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
    """What the client has to do."""
    try_out: Callable[[PackageGroup, Workspace], str | None]
    """Runs the client; returns a message about what went wrong, or None."""

    @property
    def key(self) -> str:
        """The key of its figure in the record."""
        return "client_" + "_".join(self.title.lower().replace("/", "").replace("-", " ").split())

    @property
    def words(self) -> str:
        """The words of its bound, version first: `benchmarks/client_figures.py` makes its table of them."""
        return f"{self.title} {GROUPS[self.group].version(self.package)}, {self.apis}: {self.task}"


def rows() -> Iterator[ClientRow]:
    """The clients in the order of the table."""
    for agent in ALL_AGENTS:
        package, task = GROUPS[agent.group].package, BY_TOOL if agent.has_tools else "finished without tools"
        yield ClientRow(agent.title, agent.group, package, agent.apis, task, _agent_trial(agent))
    for library in LIBRARIES:
        task = BY_TOOL if library.has_final_text else "called a forced tool"
        yield ClientRow(library.title, library.group, library.package, library.apis, task, _library_trial(library))


def _agent_trial(agent: Agent) -> Callable[[PackageGroup, Workspace], str | None]:
    def try_out(group: PackageGroup, workspace: Workspace) -> str | None:
        runs = AgentRuns.configure(agent, group, workspace)
        task, content = runs.write_task("hello.txt")
        return runs.problem(runs.ask(agent.task_words(task)), "hello.txt", content)

    return try_out


def _library_trial(library: Library) -> Callable[[PackageGroup, Workspace], str | None]:
    return lambda group, workspace: ask_library(library, group, workspace)[1]


@section("clients")
def clients(proof: Proof) -> None:
    """Try all clients at one server, one after the other."""
    failed, missing, num_tried = list[str](), list[str](), 0
    groups = {row.group: _find_or_install(row.group) for row in rows()}
    with running(proof.folder) as server:
        for index, row in enumerate(rows()):
            group = groups[row.group]
            if group is None:
                missing.append(row.title)
                continue
            num_tried += 1
            problem = row.try_out(group, Workspace.create(_folder(proof, index), server.url, MODEL))
            if problem is not None:
                failed.append(row.title)
                say(f"    {row.title}: {problem}")
            proof.holds(row.key, problem is None, row.words)
    if missing:
        say(f"    not installed: {', '.join(missing)}")
    proof.report("clients_not_installed", len(missing))
    proof.at_least("clients_tried", num_tried, NUM_CLIENTS - len(missing))
    proof.equals("clients_failed", len(failed), 0)


def _find_or_install(name: str) -> PackageGroup | None:
    try:
        return installed(name)
    except NotInstalledError as error:
        say(f"    {error}")
        return None


def _folder(proof: Proof, index: int) -> Path:
    return proof.folder / f"client-{index}"
