"""`quire launch AGENT` and `quire connect AGENT`: run a coding agent on a local model with one command.

    find a server by its admin socket, or start one ─► make the agent's folder ─► run the agent ─► print cached tokens

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
from quire.cli.shared.ending import ENDINGS, ending
from quire.cli.shared.found_servers import FoundServer, linked_socket, running_servers, server_behind
from quire.config.home import expanded
from quire.errors import ConfigError

NO_KEY = "none"
"""Placeholder key, because agents require a key; a server without keys accepts any key."""
LOOK_S = 0.2
START_S = 600.0
END_S = 60.0
COMFORTABLE_TOKENS = 32_768
"""A shorter context length causes a warning: an agent's first request has up to 26,000 tokens."""
SHOWN_LINES = 20
EPILOG = """\
\b
Examples:
  quire launch claude --model coder.gguf
  quire launch codex -- exec 'write a test for parse.py'
  quire connect opencode
"""
_AGENT = typer.Argument(help=f"One of {', '.join(AGENTS)}.", metavar="AGENT")
_MODEL = typer.Option("--model", help="A running model, or one to serve: a directory, a .gguf file or a hub id.")

Look = Callable[[], FoundServer | None]
"""A function that fetches the server's current counters; None if the server is gone."""


@dataclass(frozen=True, slots=True)
class _Found:
    server: Server
    look: Look


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
    with ending(), TemporaryDirectory(prefix="quire-launch-") as folder, _server(model, Path(folder)) as found:
        home = Path(folder) / client.name
        setup = client.setup(found.server, home)
        _write(setup, home)
        _warn_of_length(found.server)
        before = found.look()
        temporary = Path(folder) / "tmp"
        temporary.mkdir(mode=0o700)
        code = _run([program, *setup.arguments, *(arguments or [])], {**setup.variables, "TMPDIR": str(temporary)})
        _print_cached_tokens(before, found.look())
    raise typer.Exit(code)


def connect(agent: Annotated[str, _AGENT], model: Annotated[str | None, _MODEL] = None) -> None:
    """Print the variables and files that an agent needs to use a running server."""
    client = _client(agent)
    found = _running(model)
    if found is None:
        rule = "no server of yours is running on this machine; start one with: quire serve MODEL"
        raise ConfigError(rule, code="no_server_running")
    home = expanded("~", "set HOME") / f".quire-{client.name}"
    setup = client.setup(found.server, home)
    for path, text in setup.files.items():
        typer.echo(f"# {home / path}\n{text}\n")
    for name, value in setup.variables.items():
        typer.echo(f"export {name}={_shown(value, found.server.key)}")
    typer.echo(" ".join([client.program, *setup.arguments]))


def _shown(value: str, key: str) -> str:
    """Quote a value for a shell, or return a placeholder for the user's key, which is never printed."""
    return "YOUR_KEY" if value == key != NO_KEY else shlex.quote(value)


def _client(name: str) -> AgentClient:
    if name not in AGENTS:
        raise ConfigError(f"expected one of {', '.join(AGENTS)} as the agent, got {name!r}", code="unknown_agent")
    return AGENTS[name]


@contextmanager
def _server(model: str | None, folder: Path) -> Iterator[_Found]:
    found = _running(model)
    if found is not None:
        yield found
    elif model is None:
        rule = "no server of yours is running on this machine; pass --model to start one, or run: quire serve MODEL"
        raise ConfigError(rule, code="no_server_running")
    else:
        with _started(model, folder) as started:
            yield started


def _running(model: str | None) -> _Found | None:
    """Find a running server of this user with the model. Raises ConfigError if `model` is None and several run."""
    wanted = model if model is None or not Path(model).expanduser().exists() else str(Path(model).expanduser())
    fitting = [one for one in running_servers() if one.named(wanted) is not None]
    if model is None and len(fitting) > 1:
        names = ", ".join(f"{one.models[0].name} at {one.url}" for one in fitting)
        raise ConfigError(f"several servers run on this machine: {names}; choose one with --model")
    if not fitting:
        return None
    return _Found(_agent_server(fitting[0], wanted), lambda: _again(fitting[0].url))


def _again(url: str) -> FoundServer | None:
    return next((one for one in running_servers() if one.url == url), None)


def _agent_server(server: FoundServer, model: str | None) -> Server:
    named = server.named(model)
    if named is None:
        raise ConfigError(f"the server at {server.url} has no model {model}")
    key = os.environ.get(KEY_VARIABLE)
    if server.is_locked and not key:
        raise ConfigError(f"the server at {server.url} requires a key; set {KEY_VARIABLE}")
    return Server(server.url, named.name, key or NO_KEY, named.max_tokens)


@contextmanager
def _started(model: str, folder: Path) -> Iterator[_Found]:
    """Run a server for this agent only. It stops when this context ends."""
    admin, log = folder / "server" / "admin.sock", folder / "server.log"
    words = [sys.executable, "-m", "quire", "serve", model, "--port", "0", "--admin-socket", str(admin)]
    typer.echo(f"starting a server for {model} ...", err=True)
    with log.open("wb") as output:
        running = _child(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
        with running as process:
            answering = _until(lambda _: True, process, admin, log)
            with linked_socket(admin, answering):
                ready = _until(lambda found: all(one.is_ready for one in found.models), process, admin, log)
                yield _Found(_agent_server(ready, None), lambda: server_behind(admin))


@contextmanager
def _child(words: list[str], **how: Any) -> "Iterator[subprocess.Popen[bytes]]":
    """Spawn a child process and terminate it at the end, even if a signal arrives while the child is being spawned."""
    process = None
    try:
        with _deferred_signals() as received:
            process = subprocess.Popen(words, **how)  # noqa: S603 - quire itself, or the agent the user named
        if received:
            raise SystemExit(128 + received[0])
        yield process
    finally:
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _deferred_signals() -> Iterator[list[int]]:
    """Collect termination signals in a list, for the caller to handle afterwards."""
    received: list[int] = []
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in ENDINGS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _until(
    is_so: Callable[[FoundServer], bool], process: "subprocess.Popen[bytes]", admin: Path, log: Path
) -> FoundServer:
    """Wait until `is_so` is true of the server, and return it. Raises ConfigError with the end of the log."""
    deadline_s = monotonic() + START_S
    while monotonic() < deadline_s:
        found = server_behind(admin) if admin.exists() else None
        if found is not None and is_so(found):
            return found
        if process.poll() is not None:
            break
        sleep(LOOK_S)
    raise ConfigError("the server did not start:\n" + "\n".join(_final_lines(log.read_text(errors="replace"))))


def _final_lines(log: str) -> list[str]:
    """Return the end of a server's log: from its first error line if there is one, otherwise the last lines."""
    lines = log.rstrip().splitlines()
    (error, *_) = [*(at for at, line in enumerate(lines) if line.startswith("error: ")), 0]
    return lines[error:][-SHOWN_LINES:]


def _write(setup: AgentSetup, home: Path) -> None:
    home.mkdir(mode=0o700, parents=True)
    for path, text in setup.files.items():
        (home / path).write_text(text)


def _run(words: list[str], variables: Mapping[str, str]) -> int:
    """Run the agent in this terminal and return its exit code. This process ignores Ctrl-C, which the agent handles."""
    with _child(words, env={**os.environ, **variables}) as process:
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGINT, before)


def _warn_of_length(server: Server) -> None:
    if server.max_tokens is not None and server.max_tokens < COMFORTABLE_TOKENS:
        typer.echo(
            f"{server.model} accepts {server.max_tokens:,} tokens, prompt and output together; agents often need "
            f"{COMFORTABLE_TOKENS:,}: use a model with a longer context, or, if this one has it, give it more memory",
            err=True,
        )


def _print_cached_tokens(before: FoundServer | None, after: FoundServer | None) -> None:
    if before is None or after is None:
        return
    prompt = after.num_prompt_tokens - before.num_prompt_tokens
    cached = after.num_cached_tokens - before.num_cached_tokens
    if prompt:
        typer.echo(f"quire: {cached:,} of {prompt:,} prompt tokens were cached ({cached / prompt:.0%})", err=True)
