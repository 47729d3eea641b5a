"""`quire launch AGENT` and `quire connect AGENT`: run a coding agent on a local model with one command.

    find a server by its admin socket, or start one ─► print how long the first prompt will take
        ─► create the agent's folder ─► run the agent, with progress of its first prompt ─► print what was done

At the end the folder is removed with all its files, and a server that was started for the agent is stopped.
"""

import os
import shlex
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.agents.agent_clients import AGENTS, KEY_VARIABLE, AgentClient, AgentSetup, Server
from quire.cli.agents.ending_report import AgentEnd, ServedWork, report_lines, settled_state
from quire.cli.agents.first_answer import first_prompt_progress
from quire.cli.agents.launched_server import child_process, started_server
from quire.cli.agents.prompt_speeds import (
    MIN_KEPT_TOKENS,
    PromptSpeeds,
    machine_name,
    start_line,
    state_file,
    timed_speed,
)
from quire.cli.shared.ending import exit_on_signals
from quire.cli.shared.found_servers import FoundServer, running_servers, server_on_socket
from quire.config.home import expand_home
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.cli.watch.watch_source import WatchSource

NO_KEY = "none"
"""Placeholder key, because agents require a key; a server without keys accepts any key."""
RECOMMENDED_TOKENS = 32_768
"""A shorter context length causes a warning: an agent's first request has up to 26,000 tokens."""
EPILOG = """\
\b
Examples:
  quire launch claude --model coder.gguf
  quire launch codex -- exec 'write a test for parse.py'
  quire connect opencode
"""
_AGENT = typer.Argument(help=f"One of {', '.join(AGENTS)}.", metavar="AGENT")
_MODEL = typer.Option("--model", help="A running model, or one to serve: a directory, a .gguf file or a hub id.")


@dataclass(frozen=True, slots=True)
class _Target:
    server: Server
    found: FoundServer
    socket_path: Path
    is_own: bool = False
    """Whether the server was started for this agent."""

    @property
    def root(self) -> str:
        """The path or hub id of the model."""
        model = self.found.find_model(self.server.model)
        return self.server.model if model is None else model.root

    @property
    def source(self) -> "WatchSource":
        """The server's snapshots, through its admin socket."""
        from quire.cli.watch.watch_source import WatchSource

        return WatchSource(self.found.url, self.socket_path)

    def read(self) -> FoundServer | None:
        """Read the server's current state and counters; None: the server does not respond."""
        return server_on_socket(self.socket_path)


def launch(
    agent: Annotated[str, _AGENT],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments passed to the agent after --.")] = None,
    model: Annotated[str | None, _MODEL] = None,
) -> None:
    """Run a coding agent on one of your models. Its own configuration stays unchanged."""
    client = _client(agent)
    program = shutil.which(client.program)
    if program is None:
        raise ConfigError(f"{client.program} is not installed; install it with: {client.install}")
    with exit_on_signals(), TemporaryDirectory(prefix="quire-launch-") as root, _target(model, Path(root)) as target:
        home = Path(root) / client.name
        setup = client.setup(target.server, home)
        _write(setup, home)
        _warn_of_length(target.server)
        speeds = _prompt_speeds(target)
        typer.echo(start_line(target.server, target.root, client, speeds), err=True)
        before = target.read()
        temporary = Path(root) / "tmp"
        temporary.mkdir(mode=0o700)
        command = [program, *setup.arguments, *(arguments or [])]
        with nullcontext() if target.found.is_locked else first_prompt_progress(target.source, target.server.model):
            end = _run(client.name, command, {**setup.variables, "TMPDIR": str(temporary)})
        _report(end, target, before, speeds)
    raise typer.Exit(end.code if end.code >= 0 else 128 - end.code)


def connect(agent: Annotated[str, _AGENT], model: Annotated[str | None, _MODEL] = None) -> None:
    """Print the variables and files that an agent needs to use a running server."""
    client = _client(agent)
    target = _running_target(model)
    if target is None:
        message = "no server of yours is running on this machine; start one with: quire serve MODEL"
        raise ConfigError(message, code="no_server_running")
    home = expand_home("~", "set HOME") / f".quire-{client.name}"
    setup = client.setup(target.server, home)
    for path, text in setup.files.items():
        typer.echo(f"# {home / path}\n{text}\n")
    for name, value in setup.variables.items():
        typer.echo(f"export {name}={_quote(value, target.server.key)}")
    typer.echo(" ".join([client.program, *setup.arguments]))


def _quote(value: str, key: str) -> str:
    """Quote a value for a shell, or return a placeholder for the user's key, which is never printed."""
    return "YOUR_KEY" if value == key != NO_KEY else shlex.quote(value)


def _client(name: str) -> AgentClient:
    if name not in AGENTS:
        raise ConfigError(f"expected one of {', '.join(AGENTS)} as the agent, got {name!r}", code="unknown_agent")
    return AGENTS[name]


@contextmanager
def _target(model: str | None, folder: Path) -> Iterator[_Target]:
    target = _running_target(model)
    if target is not None:
        yield target
    elif model is None:
        message = "no server of yours is running on this machine; pass --model to start one, or run: quire serve MODEL"
        raise ConfigError(message, code="no_server_running")
    else:
        with started_server(model, folder) as (server, admin):
            yield _Target(_agent_server(server, None), server, admin, is_own=True)


def _running_target(model: str | None) -> _Target | None:
    """Find a running server of this user that has the model. Raises ConfigError if `model` is None and several run."""
    name = model if model is None or not Path(model).expanduser().exists() else str(Path(model).expanduser())
    servers = [server for server in running_servers() if server.find_model(name) is not None]
    if model is None and len(servers) > 1:
        names = ", ".join(f"{server.models[0].name} at {server.url}" for server in servers)
        raise ConfigError(f"several servers run on this machine: {names}; choose one with --model")
    if not servers:
        return None
    return _Target(_agent_server(servers[0], name), servers[0], servers[0].socket_path)


def _agent_server(server: FoundServer, model: str | None) -> Server:
    found = server.find_model(model)
    if found is None:
        raise ConfigError(f"the server at {server.url} has no model {model}")
    key = os.environ.get(KEY_VARIABLE)
    if server.is_locked and not key:
        raise ConfigError(f"the server at {server.url} requires a key; set {KEY_VARIABLE}")
    return Server(server.url, found.name, key or NO_KEY, found.max_tokens)


def _write(setup: AgentSetup, home: Path) -> None:
    home.mkdir(mode=0o700, parents=True)
    for path, text in setup.files.items():
        (home / path).write_text(text)


def _prompt_speeds(target: _Target) -> PromptSpeeds:
    """Return the speeds of this machine. A server that was just loaded is timed if its model's speed is unknown; a
    server in use is not, because its other clients would change the result."""
    speeds = PromptSpeeds.read(state_file(), machine_name())
    if target.is_own and target.root not in speeds.by_model:
        speed = timed_speed(target.server)
        return speeds if speed is None else speeds.keep(target.root, speed)
    return speeds


def _run(name: str, command: list[str], variables: Mapping[str, str]) -> AgentEnd:
    """Run the agent in this terminal until it ends. This process only notes Ctrl-C, which the agent handles."""
    interrupts: list[int] = []
    with child_process(command, env={**os.environ, **variables}) as process:
        old_handler = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
        try:
            return AgentEnd(name, process.wait(), is_interrupted=bool(interrupts))
        finally:
            signal.signal(signal.SIGINT, old_handler)


def _warn_of_length(server: Server) -> None:
    if server.max_tokens is not None and server.max_tokens < RECOMMENDED_TOKENS:
        typer.echo(
            f"{server.model} accepts {server.max_tokens:,} tokens, prompt and output together; agents often need "
            f"{RECOMMENDED_TOKENS:,}: use a model with a longer context, or more memory for this model",
            err=True,
        )


def _report(end: AgentEnd, target: _Target, before: FoundServer | None, speeds: PromptSpeeds) -> None:
    """Print how the agent ended and what the server did, and keep the speed of its prompts."""
    if end.is_interrupted:
        typer.echo("", err=True)  # the terminal has written ^C on the agent's last line
    after = None if before is None else settled_state(target.read, before.num_open_requests)
    work = None
    if before is not None and after is not None:
        work = ServedWork.between(before, after, target.server.model)
        if work.num_computed_tokens >= MIN_KEPT_TOKENS and work.prompt_tokens_per_s:
            speeds.keep(target.root, work.prompt_tokens_per_s)
    for line in report_lines(end, work):
        typer.echo(f"quire: {line}", err=True)
