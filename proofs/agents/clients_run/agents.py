"""The six coding agents: how each is configured for a server, given a task, and given another in the same conversation.

Five get the configuration that `quire launch` and `quire connect` write; Continue gets a file that is made here.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from proofs.agents.clients_run.packages import PackageGroup
from proofs.agents.clients_run.runs import ClientRun, Invocation, Workspace, nonce, run_client
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
    task_words: Callable[[str], Sequence[str]]
    """The arguments that give it a task in a new conversation."""
    apis: str
    """The APIs that it uses, for the table of clients."""
    continue_words: Callable[[str], Sequence[str]] | None = None
    """The arguments that give it a task in its last conversation; None if it cannot continue one."""
    has_tools: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""


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
"""Turns off the proxies of `runs`, for an agent that ignores NO_PROXY and uses them for loopback too."""
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
        variables=NO_PROXIES,
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
    """Runs an agent that is configured for one server and one user."""

    agent: Agent
    workspace: Workspace
    invocation: Invocation

    @classmethod
    def configure(cls, agent: Agent, group: PackageGroup, workspace: Workspace) -> "AgentRuns":
        """Configure an agent, and write its configuration files."""
        folder = workspace.folder / "settings"
        setup = agent.setup(Server(workspace.url, workspace.model, workspace.key, MAX_TOKENS), folder)
        folder.mkdir(mode=0o700)
        for path, text in setup.files.items():
            (folder / path).write_text(text)
        variables = {**setup.variables, **agent.variables}
        program = group.programs / agent.program
        return cls(agent, workspace, Invocation((str(program), *setup.arguments), variables, group.programs))

    def ask(self, arguments: Sequence[str]) -> ClientRun:
        """Run the agent with these arguments of its own."""
        base = self.invocation
        return run_client(self.workspace, Invocation((*base.words, *arguments), base.variables, base.programs))

    def write_task(self, name: str) -> tuple[str, str]:
        """A task to write a file, and the content that the file must have."""
        content = nonce()
        path = self.workspace.work / name if self.agent.has_tools else name
        return f"Write the file {path} with the content {content} and then say that it is done.", content

    def problem(self, run: ClientRun, name: str, content: str) -> str | None:
        """A message about what the agent did not do: write the file, or say that it is done; None if it did both."""
        path = self.workspace.work / name
        if not path.is_file():
            return f"{name} was not written: {run.output_end}"
        if path.read_text().strip() != content:
            return f"{name} has {path.read_text()[:200]!r} and not {content!r}"
        if self.agent.has_tools and DONE not in run.output:
            return f"the final answer is missing: {run.output_end}"
        return None if run.code == 0 else f"it ended with {run.code}: {run.output_end}"
