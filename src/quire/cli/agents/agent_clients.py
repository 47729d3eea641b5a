"""How each coding agent is configured for a quire server: environment variables, and files in the agent's own folder.

The user's own configuration is neither read nor changed. Keys are passed only in the environment, because command lines
are visible to all users of a machine.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.config.home import expand_home

KEY_VARIABLE = "QUIRE_API_KEY"
"""Variable with the API key; configuration files contain the variable's name instead of the key."""
MAX_WAIT_MS = 6 * 3_600_000
"""How long an agent waits for a response. On a slow machine a first prompt takes longer than the agents' own limits of
2 to 10 minutes. A server on this machine that has ended closes the connection, so a long limit costs nothing."""
MAX_CLAUDE_IDLE_MS = 1_800_000
"""The largest idle limit of a stream that Claude Code accepts. A stream of quire has an event every few seconds."""


@dataclass(frozen=True, slots=True)
class Server:
    """The server and model that an agent uses."""

    url: str
    model: str
    key: str
    max_tokens: int | None = None
    """Maximum length of a sequence; None: unknown."""


@dataclass(frozen=True, slots=True)
class AgentSetup:
    """The configuration of one agent."""

    variables: Mapping[str, str]
    files: Mapping[str, str]
    """Contents of files, by path relative to the agent's folder."""
    arguments: Sequence[str] = ()
    """Command-line arguments, placed before the user's own."""


@dataclass(frozen=True, slots=True)
class AgentClient:
    """A coding agent that the user has installed or can install."""

    name: str
    program: str
    install: str
    setup: Callable[[Server, Path], AgentSetup]
    """Builds the configuration from a server and the agent's folder."""
    num_first_tokens: int
    """Size of the agent's largest first prompt, in tokens: system text, tools, and a short task."""


def _claude(server: Server, folder: Path) -> AgentSetup:
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL",
             "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")  # fmt: skip
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "CLAUDE_CONFIG_DIR": str(folder),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "DISABLE_AUTOUPDATER": "1",
        "API_TIMEOUT_MS": str(MAX_WAIT_MS),
        "API_FORCE_IDLE_TIMEOUT": "0",  # removes the limit of 300 s of its HTTP client
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(MAX_CLAUDE_IDLE_MS),
        "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS": str(MAX_CLAUDE_IDLE_MS),
        **dict.fromkeys(names, server.model),
    }
    # Without this argument, git's status precedes the tools in the prompt, and its changes invalidate cached prefixes.
    return AgentSetup(variables, {}, ("--exclude-dynamic-system-prompt-sections",))


def _codex(server: Server, folder: Path) -> AgentSetup:
    lines = [
        f"model = {json.dumps(server.model)}",
        'model_provider = "quire"',
        "check_for_update_on_startup = false",
        *([] if server.max_tokens is None else [f"model_context_window = {server.max_tokens}"]),
        "",
        "[model_providers.quire]",
        'name = "quire"',
        f"base_url = {json.dumps(server.url + '/v1')}",
        f"env_key = {json.dumps(KEY_VARIABLE)}",
        'wire_api = "responses"',
        f"stream_idle_timeout_ms = {MAX_WAIT_MS}",
        "stream_max_retries = 1",  # each retry computes the answer again; 5 by default
        "",
        "[analytics]",
        "enabled = false",
        "",
    ]
    return AgentSetup({"CODEX_HOME": str(folder), KEY_VARIABLE: server.key}, {"config.toml": "\n".join(lines)})


def _opencode(server: Server, folder: Path) -> AgentSetup:
    wait_limits = dict.fromkeys(("timeout", "headerTimeout", "chunkTimeout"), MAX_WAIT_MS)
    limits = {} if server.max_tokens is None else {"limit": {"context": server.max_tokens, "output": 8192}}
    config = {
        "model": f"quire/{server.model}",
        "small_model": f"quire/{server.model}",
        "autoupdate": False,
        "share": "disabled",
        "provider": {
            "quire": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "quire",
                "options": {"baseURL": f"{server.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}", **wait_limits},
                "models": {server.model: {"name": server.model, **limits}},
            }
        },
    }
    xdg_folders = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("DATA", "STATE", "CACHE", "CONFIG")}
    variables = {"OPENCODE_CONFIG": str(folder / "opencode.json"), KEY_VARIABLE: server.key, **xdg_folders}
    return AgentSetup(variables, {"opencode.json": json.dumps(config, indent=2)})


def _aider(server: Server, folder: Path) -> AgentSetup:
    """Configure aider with another home folder, whose .gitconfig includes the user's, because aider writes files and
    configuration to the home folder and has no setting to change that."""
    home = expand_home("~", "set HOME")
    variables = {
        "HOME": str(folder),
        "XDG_CONFIG_HOME": os.environ.get("XDG_CONFIG_HOME") or str(home / ".config"),
        "OPENAI_API_BASE": f"{server.url}/v1",
        "OPENAI_API_KEY": server.key,
        "AIDER_MODEL": f"openai/{server.model}",
        "AIDER_ANALYTICS": "false",
        "AIDER_CHECK_UPDATE": "false",
        "AIDER_SHOW_MODEL_WARNINGS": "false",
        "AIDER_GITIGNORE": "false",
        "AIDER_TIMEOUT": str(MAX_WAIT_MS // 1000),
        "AIDER_INPUT_HISTORY_FILE": str(folder / "input.history"),
        "AIDER_CHAT_HISTORY_FILE": str(folder / "chat.history.md"),
    }
    return AgentSetup(variables, {".gitconfig": f"[include]\n\tpath = {json.dumps(str(home / '.gitconfig'))}\n"})


def _qwen(server: Server, folder: Path) -> AgentSetup:
    variables = {
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": server.key,
        "OPENAI_MODEL": server.model,
        "QWEN_HOME": str(folder),
        "QWEN_RUNTIME_DIR": str(folder),
        "QWEN_CODE_API_TIMEOUT_MS": str(MAX_WAIT_MS),
        "QWEN_STREAM_IDLE_TIMEOUT_MS": str(MAX_WAIT_MS),
        "QWEN_STREAM_MAX_LIFETIME_MS": str(MAX_WAIT_MS),
    }
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    return AgentSetup(variables, {"settings.json": json.dumps(settings, indent=2)})


AGENTS = {
    agent.name: agent
    for agent in (
        AgentClient("claude", "claude", "npm install -g @anthropic-ai/claude-code", _claude, 25_800),
        AgentClient("codex", "codex", "npm install -g @openai/codex", _codex, 8_800),
        AgentClient("opencode", "opencode", "npm install -g opencode-ai", _opencode, 7_600),
        AgentClient("aider", "aider", "pip install aider-chat", _aider, 2_800),
        AgentClient("qwen", "qwen", "npm install -g @qwen-code/qwen-code", _qwen, 18_900),
    )
}
