"""`quire launch` with the five real agents: the task is done, and nothing of the user's is touched.

The user has configuration of their own for each agent, which leads nowhere: whoever read it would fail. The server has
keys and is found by its admin socket; where servers usually listen somebody else does, who must not be asked.
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
from proofs.agents.clients_run.runs import NOWHERE, Ground, Invocation, run_client
from proofs.agents.clients_run.scripted_server import MODEL, running
from proofs.api.load import MARK, marked
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
"""What the user has; it would lead every agent astray."""
LOOK_S = 0.02
FEWEST_LOOKS = 20


class ProcessList:
    """Looks at everybody's command line, again and again, as anybody on the machine can."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self.num_looks = self.num_seen = 0
        self._over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator["ProcessList"]:
        """As long as something runs."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """At everybody who runs now."""
        self.num_looks += 1
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                self.num_seen += self._secret in path.read_bytes()


class Decoy:
    """Listens where servers usually do, and counts who comes. None if that port is taken."""

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
        """Nobody is counted any more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder and a hash of what is in it; git's own are git's."""
    paths = [path for path in sorted(folder.rglob("*")) if ".git" not in path.relative_to(folder).parts]
    return {str(path.relative_to(folder)): _hash(path) for path in paths}


def _hash(path: Path) -> str:
    if path.is_symlink():
        return f"to {path.readlink()}"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"


@dataclass
class Launches:
    """What came of all of them."""

    num_tried: int = 0
    num_files_left: int = 0
    num_own_changed: int = 0
    num_keys_seen: int = 0
    num_processes_left: int = 0
    fewest_looks: int = 1 << 30
    failed: list[str] = field(default_factory=list)

    def add(
        self, agent: Agent, problem: str | None, left: Mapping[str, list[str]], looks: ProcessList, mark: str
    ) -> None:
        """One that ended."""
        processes = marked(mark)
        self.num_tried += 1
        self.num_files_left += len(left["left"])
        self.num_own_changed += len(left["changed"])
        self.num_keys_seen += looks.num_seen
        self.num_processes_left += len(processes)
        self.fewest_looks = min(self.fewest_looks, looks.num_looks)
        if problem or left["left"] or left["changed"] or looks.num_seen or processes:
            self.failed.append(agent.title)
            say(f"    {agent.title}: {problem}, {dict(left)}, keys seen {looks.num_seen}, processes {processes}")


@section("launch")
def launch(proof: Proof) -> None:
    """The five agents, each by one command."""
    keys, runtime = proof.folder / "keys.json", proof.folder / "runtime" / "quire"
    runtime.mkdir(parents=True, mode=0o700)
    key, launches = add_key(keys, "somebody"), Launches()
    decoy = Decoy()
    try:
        with running(proof.folder, "--keys-file", str(keys)) as server:
            (runtime / "admin-1.sock").symlink_to(server.server.admin_path)
            for agent in ALL_AGENTS:
                name = next((name for name, one in AGENTS.items() if one.program == agent.program), None)
                if name is not None:
                    ground = Ground.made(proof.folder / f"launch-{name}", server.url, MODEL, key)
                    _launch(agent, name, ground, launches)
    finally:
        decoy.close()
    proof.equals("launches", launches.num_tried, len(AGENTS))
    proof.at_least("launch_looks", launches.fewest_looks, FEWEST_LOOKS, "at the process list, of the shortest run")
    proof.equals("launch_own_changed", launches.num_own_changed, 0, "files in the user's home")
    proof.equals("launch_files_left", launches.num_files_left, 0)
    proof.equals("launch_processes_left", launches.num_processes_left, 0)
    proof.equals("launch_keys_seen", launches.num_keys_seen, 0, "in the process list")
    proof.equals("launch_ports_guessed", decoy.num_callers, 0)
    proof.equals("launch_failed", len(launches.failed), 0)


def _launch(agent: Agent, name: str, ground: Ground, launches: Launches) -> None:
    try:
        group = installed(agent.group)
    except NotInstalledError as error:
        say(f"    {error}")
        return
    _furnish(ground)
    desk = AgentRuns(agent, ground, Invocation(()))
    task, content = desk.write_task("hello.txt")
    before = {one: contents(one) for one in (ground.home, ground.work, ground.folder / "tmp")}
    mark = f"launch-{name}-{content}"
    variables = {
        KEY_VARIABLE: ground.key,
        "XDG_RUNTIME_DIR": str(ground.folder.parent / "runtime"),
        "PYTHONPATH": str(ROOT / "src"),
        MARK: mark,
        **agent.around,
    }
    words = [sys.executable, "-m", "quire", "launch", name, "--", *agent.asked(task)]
    with ProcessList(ground.key).watched() as looks:
        run = run_client(ground, Invocation(words, variables, group.programs))
    problem = desk.problem(run, "hello.txt", content)
    if problem is None and "prompt tokens were cached" not in run.errors:
        problem = f"nothing was said of the cache: {run.errors[-300:]}"
    (ground.work / "hello.txt").unlink(missing_ok=True)
    launches.add(agent, problem, _differences(before, ground.home), looks, mark)


def _furnish(ground: Ground) -> None:
    """A user's own configuration, and a repository to work in."""
    for path, text in OWN_FILES.items():
        (ground.home / path).parent.mkdir(parents=True, exist_ok=True)
        (ground.home / path).write_text(text)
    ground.make_repository()


def _differences(before: Mapping[Path, Mapping[str, str]], home: Path) -> dict[str, list[str]]:
    """Files of the user's that are not as they were, and files that were not there."""
    left, changed = list[str](), list[str]()
    for folder, was in before.items():
        now = contents(folder)
        left += [f"{folder.name}/{path}" for path in now if path not in was]
        changed += [f"{folder.name}/{path}" for path, one in was.items() if now.get(path) != one]
    return {"left": left, "changed": changed}
