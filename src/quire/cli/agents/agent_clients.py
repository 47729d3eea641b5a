"""How each coding agent is configured to use a quire server: variables, and files in its own folder.

Nothing of the user's own configuration is read or written, and keys are in the environment alone: command lines are
visible to all users of a machine.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.config.home import expanded

KEY_VARIABLE = "QUIRE_API_KEY"
"""What files name instead of the key itself."""


@dataclass(frozen=True, slots=True)
class Server:
    """The server and model that an agent uses."""

    url: str
    model: str
    key: str
    max_tokens: int | None = None
    """The longest sequence, where that is known."""


@dataclass(frozen=True, slots=True)
class AgentSetup:
    """The configuration of one agent."""

    variables: Mapping[str, str]
    files: Mapping[str, str]
    """Contents by the path below its folder."""
    arguments: Sequence[str] = ()
    """Placed before the user's own arguments."""


@dataclass(frozen=True, slots=True)
class AgentClient:
    """One agent, installed by the user."""

    name: str
    program: str
    install: str
    setup: Callable[[Server, Path], AgentSetup]
    """Builds the configuration from a server and the agent's folder."""


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
        **dict.fromkeys(names, server.model),
    }
    # Otherwise git's status comes before the tools in the prompt, and any change of it invalidates the cached prefix.
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
        "",
        "[analytics]",
        "enabled = false",
        "",
    ]
    return AgentSetup({"CODEX_HOME": str(folder), KEY_VARIABLE: server.key}, {"config.toml": "\n".join(lines)})


def _opencode(server: Server, folder: Path) -> AgentSetup:
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
                "options": {"baseURL": f"{server.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
                "models": {server.model: {"name": server.model, **limits}},
            }
        },
    }
    homes = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("DATA", "STATE", "CACHE", "CONFIG")}
    variables = {"OPENCODE_CONFIG": str(folder / "opencode.json"), KEY_VARIABLE: server.key, **homes}
    return AgentSetup(variables, {"opencode.json": json.dumps(config, indent=2)})


def _aider(server: Server, folder: Path) -> AgentSetup:
    """aider keeps files and configuration in the user's home, and no setting changes that. So it gets another home,
    whose .gitconfig includes the user's."""
    home = expanded("~", "set HOME")
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
    }
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    return AgentSetup(variables, {"settings.json": json.dumps(settings, indent=2)})


AGENTS = {
    one.name: one
    for one in (
        AgentClient("claude", "claude", "npm install -g @anthropic-ai/claude-code", _claude),
        AgentClient("codex", "codex", "npm install -g @openai/codex", _codex),
        AgentClient("opencode", "opencode", "npm install -g opencode-ai", _opencode),
        AgentClient("aider", "aider", "pip install aider-chat", _aider),
        AgentClient("qwen", "qwen", "npm install -g @qwen-code/qwen-code", _qwen),
    )
}
