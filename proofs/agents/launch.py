"""`quire launch` with the five real agents: the task is done, and no file of the user is changed.

The user's own configuration of each agent names a server that does not exist: an agent that read it would fail. The
server needs a key and is found by its admin socket; at the default port a decoy listens, which must get no connection.
"""

import hashlib
import json
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.record import ROOT, say
from proofs.agents.clients_run.agents import ALL_AGENTS, Agent, AgentRuns
from proofs.agents.clients_run.packages import NotInstalledError, installed
from proofs.agents.clients_run.runs import NOWHERE, Invocation, Workspace, run_client
from proofs.agents.clients_run.scripted_server import MODEL, running
from proofs.api.load import MARK, processes_with_mark
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key
from quire.cli.agents.agent_clients import AGENTS, KEY_VARIABLE
from quire.config import ServerSettings

OWN_FILES = {
    ".claude.json": '{"theme": "dark"}',
    ".claude/settings.json": json.dumps({"env": {"ANTHROPIC_BASE_URL": NOWHERE}, "model": "elsewhere"}),
    ".codex/config.toml": f'model_provider = "own"\n[model_providers.own]\nname = "own"\nbase_url = "{NOWHERE}"\n',
    ".config/opencode/opencode.json": '{"model": "elsewhere/none"}',
    ".aider.conf.yml": f"model: openai/elsewhere\nopenai-api-base: {NOWHERE}\n",
    ".qwen/settings.json": '{"security": {"auth": {"selectedType": "anthropic"}}}',
    ".qwen/.env": f"OPENAI_BASE_URL={NOWHERE}\n",
    ".gitconfig": "[user]\n\tname = somebody\n",
}
"""The files in the user's home: each would lead its agent to a wrong server."""
LOOK_S = 0.02
MIN_LOOKS = 20


class ProcessList:
    """Polls the command lines of all processes for a secret, as any user of the machine can."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self.num_looks = self.num_seen = 0
        self._stop = threading.Event()

    @contextmanager
    def watching(self) -> Iterator["ProcessList"]:
        """Poll while the block runs."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Search the command lines of all processes once."""
        self.num_looks += 1
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                self.num_seen += self._secret in path.read_bytes()


class Decoy:
    """Listens at the default port of servers and counts connections."""

    def __init__(self) -> None:
        self.num_callers = 0
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", ServerSettings().port))
        self._listener.listen()
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        with suppress(OSError):
            while True:
                self._listener.accept()[0].close()
                self.num_callers += 1

    def close(self) -> None:
        """Stop listening and counting."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def contents(folder: Path) -> dict[str, str]:
    """Path -> hash of every file below a folder, without those in `.git`."""
    paths = [path for path in sorted(folder.rglob("*")) if ".git" not in path.relative_to(folder).parts]
    return {str(path.relative_to(folder)): _hash(path) for path in paths}


def _hash(path: Path) -> str:
    if path.is_symlink():
        return f"to {path.readlink()}"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"


@dataclass
class Launches:
    """Counts over all launches."""

    num_tried: int = 0
    num_files_left: int = 0
    num_own_changed: int = 0
    num_keys_seen: int = 0
    num_processes_left: int = 0
    min_looks: int = 1 << 30
    failed: list[str] = field(default_factory=list)

    def add(
        self, agent: Agent, problem: str | None, changes: Mapping[str, list[str]], polls: ProcessList, mark: str
    ) -> None:
        """Count a launch that has ended."""
        processes = processes_with_mark(mark)
        self.num_tried += 1
        self.num_files_left += len(changes["left"])
        self.num_own_changed += len(changes["changed"])
        self.num_keys_seen += polls.num_seen
        self.num_processes_left += len(processes)
        self.min_looks = min(self.min_looks, polls.num_looks)
        if problem or changes["left"] or changes["changed"] or polls.num_seen or processes:
            self.failed.append(agent.title)
            say(f"    {agent.title}: {problem}, {dict(changes)}, keys seen {polls.num_seen}, processes {processes}")


@section("launch")
def launch(proof: Proof) -> None:
    """Launch each of the five agents by one command."""
    keys, runtime = proof.folder / "keys.json", proof.folder / "runtime" / "quire"
    runtime.mkdir(parents=True, mode=0o700)
    key, launches = add_key(keys, "somebody"), Launches()
    decoy = Decoy()
    try:
        with running(proof.folder, "--keys-file", str(keys)) as server:
            (runtime / "admin-1.sock").symlink_to(server.server.admin_path)
            for agent in ALL_AGENTS:
                name = next((name for name, client in AGENTS.items() if client.program == agent.program), None)
                if name is not None:
                    workspace = Workspace.create(proof.folder / f"launch-{name}", server.url, MODEL, key)
                    _launch(agent, name, workspace, launches)
    finally:
        decoy.close()
    proof.equals("launches", launches.num_tried, len(AGENTS))
    proof.at_least("launch_looks", launches.min_looks, MIN_LOOKS, "at the process list, of the shortest run")
    proof.equals("launch_own_changed", launches.num_own_changed, 0, "files in the user's home")
    proof.equals("launch_files_left", launches.num_files_left, 0)
    proof.equals("launch_processes_left", launches.num_processes_left, 0)
    proof.equals("launch_keys_seen", launches.num_keys_seen, 0, "in the process list")
    proof.equals("launch_ports_guessed", decoy.num_callers, 0)
    proof.equals("launch_failed", len(launches.failed), 0)


def _launch(agent: Agent, name: str, workspace: Workspace, launches: Launches) -> None:
    try:
        group = installed(agent.group)
    except NotInstalledError as error:
        say(f"    {error}")
        return
    _prepare_home(workspace)
    runs = AgentRuns(agent, workspace, Invocation(()))
    task, content = runs.write_task("hello.txt")
    before = {folder: contents(folder) for folder in (workspace.home, workspace.work, workspace.folder / "tmp")}
    mark = f"launch-{name}-{content}"
    variables = {
        KEY_VARIABLE: workspace.key,
        "XDG_RUNTIME_DIR": str(workspace.folder.parent / "runtime"),
        "XDG_STATE_HOME": str(workspace.folder.parent / "state"),
        "PYTHONPATH": str(ROOT / "src"),
        MARK: mark,
        **agent.variables,
    }
    command = [sys.executable, "-m", "quire", "launch", name, "--", *agent.task_words(task)]
    with ProcessList(workspace.key).watching() as polls:
        run = run_client(workspace, Invocation(command, variables, group.programs))
    problem = runs.problem(run, "hello.txt", content)
    if problem is None and "prompt tokens were cached" not in run.errors:
        problem = f"stderr does not name the cached tokens: {run.errors[-300:]}"
    (workspace.work / "hello.txt").unlink(missing_ok=True)
    launches.add(agent, problem, _differences(before, workspace.home), polls, mark)


def _prepare_home(workspace: Workspace) -> None:
    """Write the user's own configuration, and make a repository to work in."""
    for path, text in OWN_FILES.items():
        (workspace.home / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace.home / path).write_text(text)
    workspace.make_repository()


def _differences(before: Mapping[Path, Mapping[str, str]], home: Path) -> dict[str, list[str]]:
    """The user's files that are new (`left`), and those that differ (`changed`)."""
    left, changed = list[str](), list[str]()
    for folder, before_hashes in before.items():
        after = contents(folder)
        left += [f"{folder.name}/{path}" for path in after if path not in before_hashes]
        changed += [f"{folder.name}/{path}" for path, old_hash in before_hashes.items() if after.get(path) != old_hash]
    return {"left": left, "changed": changed}
