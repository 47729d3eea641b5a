"""The six coding agents: how each is told of a server, asked, and asked again in the same conversation.

Five are told what `quire launch` and `quire connect` tell them; Continue gets a file of its own.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from proofs.agents.clients_run.packages import PackageGroup
from proofs.agents.clients_run.runs import ClientRun, Ground, Invocation, nonce, run_client
from proofs.agents.clients_run.scripted_model import DONE
from quire.cli.agents.agent_clients import AGENTS, AgentSetup, Server

MAX_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Agent:
    """A program that edits files."""

    title: str
    group: str
    program: str
    setup: Callable[[Server, Path], AgentSetup]
    asked: Callable[[str], Sequence[str]]
    """Its words for a task in a new conversation."""
    apis: str
    """Whom it asks."""
    asked_again: Callable[[str], Sequence[str]] | None = None
    """In the conversation before."""
    has_tools: bool = True
    around: Mapping[str, str] = field(default_factory=dict)
    """What it needs beside its settings."""


def _continue(server: Server, folder: Path) -> AgentSetup:
    model = {
        "name": server.model,
        "provider": "openai",
        "model": server.model,
        "apiBase": f"{server.url}/v1",
        "apiKey": server.key,
        "roles": ["chat"],
        "capabilities": ["tool_use"],
    }
    config = {"name": "quire", "version": "1.0.0", "schema": "v1", "models": [model]}
    return AgentSetup(
        {"CONTINUE_GLOBAL_DIR": str(folder)},
        {"config.yaml": json.dumps(config)},
        ("--config", str(folder / "config.yaml")),
    )


NO_PROXIES = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"), "")
"""For who takes the way to the network for its way to loopback, whatever NO_PROXY says."""
_CODEX = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_CLAUDE = ("--permission-mode", "acceptEdits")
ALL_AGENTS = (
    Agent(
        "Claude Code",
        "claude-code",
        "claude",
        AGENTS["claude"].setup,
        lambda task: ("-p", task, *_CLAUDE),
        "Messages",
        lambda task: ("-p", "--continue", task, *_CLAUDE),
    ),
    Agent(
        "Codex CLI",
        "codex",
        "codex",
        AGENTS["codex"].setup,
        lambda task: ("exec", *_CODEX, task),
        "Responses",
        lambda task: ("exec", "resume", "--last", *_CODEX, task),
    ),
    Agent(
        "opencode",
        "opencode",
        "opencode",
        AGENTS["opencode"].setup,
        lambda task: ("run", task),
        "chat",
        lambda task: ("run", "--continue", task),
    ),
    Agent(
        "qwen-code",
        "qwen-code",
        "qwen",
        AGENTS["qwen"].setup,
        lambda task: ("--yolo", task),
        "chat",
        lambda task: ("--yolo", "--continue", task),
        around=NO_PROXIES,
    ),
    Agent("Continue cn", "continue", "cn", _continue, lambda task: ("--auto", "-p", task), "chat"),
    Agent(
        "aider",
        "aider",
        "aider",
        AGENTS["aider"].setup,
        lambda task: ("--yes-always", "--no-git", "--no-auto-lint", "--message", task),
        "chat",
        has_tools=False,
    ),
)


@dataclass(frozen=True, slots=True)
class AgentRuns:
    """An agent, set up for one server and one user."""

    agent: Agent
    ground: Ground
    invocation: Invocation

    @classmethod
    def opened(cls, agent: Agent, group: PackageGroup, ground: Ground) -> "AgentRuns":
        """With the files it is told by written."""
        folder = ground.folder / "settings"
        setup = agent.setup(Server(ground.url, ground.model, ground.key, MAX_TOKENS), folder)
        folder.mkdir(mode=0o700)
        for path, text in setup.files.items():
            (folder / path).write_text(text)
        variables = {**setup.variables, **agent.around}
        program = group.programs / agent.program
        return cls(agent, ground, Invocation((str(program), *setup.arguments), variables, group.programs))

    def ask(self, words: Sequence[str]) -> ClientRun:
        """Run it with these words of its own."""
        how = self.invocation
        return run_client(self.ground, Invocation((*how.words, *words), how.variables, how.programs))

    def write_task(self, name: str) -> tuple[str, str]:
        """A task to write a file, and what must stand in it."""
        content = nonce()
        path = self.ground.work / name if self.agent.has_tools else name
        return f"Write the file {path} with the content {content} and then say that it is done.", content

    def problem(self, run: ClientRun, name: str, content: str) -> str | None:
        """What it did not do: the file, or a last word."""
        path = self.ground.work / name
        if not path.is_file():
            return f"{name} was not written: {run.shown}"
        if path.read_text().strip() != content:
            return f"{name} has {path.read_text()[:200]!r} and not {content!r}"
        if self.agent.has_tools and DONE not in run.output:
            return f"no last word: {run.shown}"
        return None if run.code == 0 else f"it ended with {run.code}: {run.shown}"
