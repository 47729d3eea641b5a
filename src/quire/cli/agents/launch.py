"""`quire launch AGENT` and `quire connect AGENT`: run a coding agent on a local model with one command.

    find a server by its admin socket, or start one ─► create the agent's folder ─► run the agent ─► print cached tokens

At the end the folder is removed with all its files, and a server that was started for the agent is stopped.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Annotated, Any

import typer

from quire.cli.agents.agent_clients import AGENTS, KEY_VARIABLE, AgentClient, AgentSetup, Server
from quire.cli.shared.ending import EXIT_SIGNALS, exit_on_signals
from quire.cli.shared.found_servers import FoundServer, linked_socket, running_servers, server_on_socket
from quire.config.home import expand_home
from quire.errors import ConfigError

NO_KEY = "none"
"""Placeholder key, because agents require a key; a server without keys accepts any key."""
POLL_S = 0.2
START_TIMEOUT_S = 600.0
END_TIMEOUT_S = 60.0
RECOMMENDED_TOKENS = 32_768
"""A shorter context length causes a warning: an agent's first request has up to 26,000 tokens."""
MAX_LOG_LINES = 20
EPILOG = """\
\b
Examples:
  quire launch claude --model coder.gguf
  quire launch codex -- exec 'write a test for parse.py'
  quire connect opencode
"""
_AGENT = typer.Argument(help=f"One of {', '.join(AGENTS)}.", metavar="AGENT")
_MODEL = typer.Option("--model", help="A running model, or one to serve: a directory, a .gguf file or a hub id.")

ReadServer = Callable[[], FoundServer | None]
"""A function that reads the server's current state and counters; None if the server does not respond."""


@dataclass(frozen=True, slots=True)
class _Target:
    server: Server
    read_server: ReadServer


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
        before = target.read_server()
        temporary = Path(root) / "tmp"
        temporary.mkdir(mode=0o700)
        code = _run([program, *setup.arguments, *(arguments or [])], {**setup.variables, "TMPDIR": str(temporary)})
        _print_cached_tokens(before, target.read_server())
    raise typer.Exit(code)


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
        with _start_server(model, folder) as target:
            yield target


def _running_target(model: str | None) -> _Target | None:
    """Find a running server of this user that has the model. Raises ConfigError if `model` is None and several run."""
    name = model if model is None or not Path(model).expanduser().exists() else str(Path(model).expanduser())
    servers = [server for server in running_servers() if server.find_model(name) is not None]
    if model is None and len(servers) > 1:
        names = ", ".join(f"{server.models[0].name} at {server.url}" for server in servers)
        raise ConfigError(f"several servers run on this machine: {names}; choose one with --model")
    if not servers:
        return None
    return _Target(_agent_server(servers[0], name), lambda: _server_at(servers[0].url))


def _server_at(url: str) -> FoundServer | None:
    return next((server for server in running_servers() if server.url == url), None)


def _agent_server(server: FoundServer, model: str | None) -> Server:
    found = server.find_model(model)
    if found is None:
        raise ConfigError(f"the server at {server.url} has no model {model}")
    key = os.environ.get(KEY_VARIABLE)
    if server.is_locked and not key:
        raise ConfigError(f"the server at {server.url} requires a key; set {KEY_VARIABLE}")
    return Server(server.url, found.name, key or NO_KEY, found.max_tokens)


@contextmanager
def _start_server(model: str, folder: Path) -> Iterator[_Target]:
    """Run a server for this agent only. It stops when this context ends."""
    admin, log = folder / "server" / "admin.sock", folder / "server.log"
    command = [sys.executable, "-m", "quire", "serve", model, "--port", "0", "--admin-socket", str(admin)]
    typer.echo(f"starting a server for {model} ...", err=True)
    with log.open("wb") as output:
        child = _child(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
        with child as process:
            server = _wait_until(lambda _: True, process, admin, log)
            with linked_socket(admin, server):
                server = _wait_until(lambda state: all(model.is_ready for model in state.models), process, admin, log)
                yield _Target(_agent_server(server, None), lambda: server_on_socket(admin))


@contextmanager
def _child(command: list[str], **options: Any) -> "Iterator[subprocess.Popen[bytes]]":
    """Spawn a child process and terminate it at the end, even if a signal arrives during the spawn."""
    process = None
    try:
        with _deferred_signals() as received:
            process = subprocess.Popen(command, **options)  # noqa: S603 - quire itself, or the user's agent
        if received:
            raise SystemExit(128 + received[0])
        yield process
    finally:
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _deferred_signals() -> Iterator[list[int]]:
    """Collect termination signals in a list, for the caller to handle afterwards."""
    received: list[int] = []
    old_handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in EXIT_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _wait_until(
    condition: Callable[[FoundServer], bool], process: "subprocess.Popen[bytes]", admin: Path, log: Path
) -> FoundServer:
    """Wait until the server meets the condition, and return its state. Raises ConfigError with the end of the log."""
    deadline_s = monotonic() + START_TIMEOUT_S
    while monotonic() < deadline_s:
        server = server_on_socket(admin) if admin.exists() else None
        if server is not None and condition(server):
            return server
        if process.poll() is not None:
            break
        sleep(POLL_S)
    raise ConfigError("the server did not start:\n" + "\n".join(_final_lines(log.read_text(errors="replace"))))


def _final_lines(log: str) -> list[str]:
    """Return the end of a server's log: from its first error line if there is one, otherwise the last lines."""
    lines = log.rstrip().splitlines()
    (first, *_) = [*(index for index, line in enumerate(lines) if line.startswith("error: ")), 0]
    return lines[first:][-MAX_LOG_LINES:]


def _write(setup: AgentSetup, home: Path) -> None:
    home.mkdir(mode=0o700, parents=True)
    for path, text in setup.files.items():
        (home / path).write_text(text)


def _run(command: list[str], variables: Mapping[str, str]) -> int:
    """Run the agent in this terminal and return its exit code. This process ignores Ctrl-C, which the agent handles."""
    with _child(command, env={**os.environ, **variables}) as process:
        old_handler = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGINT, old_handler)


def _warn_of_length(server: Server) -> None:
    if server.max_tokens is not None and server.max_tokens < RECOMMENDED_TOKENS:
        typer.echo(
            f"{server.model} accepts {server.max_tokens:,} tokens, prompt and output together; agents often need "
            f"{RECOMMENDED_TOKENS:,}: use a model with a longer context, or more memory for this model",
            err=True,
        )


def _print_cached_tokens(before: FoundServer | None, after: FoundServer | None) -> None:
    if before is None or after is None:
        return
    prompt = after.num_prompt_tokens - before.num_prompt_tokens
    cached = after.num_cached_tokens - before.num_cached_tokens
    if prompt:
        typer.echo(f"quire: {cached:,} of {prompt:,} prompt tokens were cached ({cached / prompt:.0%})", err=True)
