"""How fast each model reads prompts on this machine: timed after a load, replaced by what an agent's prompts took, and
kept in the user's state folder, so that `quire launch` can say how long an agent's first prompt will take.
"""

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from quire.cli.agents.agent_clients import AGENTS, AgentClient, Server
from quire.config.home import expand_home
from quire.config.machine import processor_name, usable_cpus
from quire.errors import ConfigError, MessageError

FILE_NAME = "prompt_speeds.json"
FIRST_NUM_WORDS = 16
MAX_NUM_WORDS = 256
MAX_TOKENS_PER_WORD = 6
"""Bounds the tokens of a random word and its space in any tokenizer."""
TIMED_S = 3.0
"""About the time of the second step; the first one's duration decides its size."""
TIMEOUT_S = 60.0
MIN_KEPT_TOKENS = 2_000
"""An agent's prompts replace the timed speed only if they are long enough to include the cost of attention."""
SLOW_S = 300.0
"""A first prompt of this length gets advice."""


def state_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the kept speeds, whether the file exists or not."""
    base = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return expand_home(base, "set XDG_STATE_HOME") / "quire" / FILE_NAME


def machine_name() -> str:
    """Name this machine: a home folder may be shared by several."""
    return f"{processor_name()}, {len(usable_cpus())} CPUs"


@dataclass(frozen=True, slots=True)
class PromptSpeeds:
    """Prompt tokens per second by model, on one machine."""

    path: Path
    machine: str
    by_model: Mapping[str, float]
    """Speeds by the path or hub id from which a server loads the model."""

    @classmethod
    def read(cls, path: Path, machine: str) -> "PromptSpeeds":
        """Read the kept speeds; a missing or damaged file has none."""
        return cls(path, machine, _speeds(_read_json(path).get(machine)))

    def keep(self, model: str, tokens_per_s: float) -> "PromptSpeeds":
        """Return the speeds with a new one of this model, and write them. A folder that cannot be written to is
        ignored: the estimate is a convenience."""
        speeds = {**self.by_model, model: round(tokens_per_s, 3)}
        with suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial = self.path.with_suffix(f".{secrets.token_hex(4)}")
            partial.write_text(json.dumps({**_read_json(self.path), self.machine: speeds}, indent=1))
            partial.replace(self.path)
        return PromptSpeeds(self.path, self.machine, speeds)


def _read_json(path: Path) -> dict[str, object]:
    with suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return content
    return {}


def _speeds(entry: object) -> dict[str, float]:
    pairs = entry.items() if isinstance(entry, dict) else ()
    return {str(model): float(speed) for model, speed in pairs if isinstance(speed, int | float) and speed > 0}


# -- timing ------------------------------------------------------------------------------------------------------------


def timed_speed(server: Server) -> float | None:
    """Time two prompts that no cache has, and return the prompt tokens per second of the second, which is long enough
    to be exact and short enough not to delay the agent. None: the server does not answer them."""
    with suppress(OSError, MessageError, ConfigError, ValueError, KeyError, TypeError):
        num_tokens, elapsed_s = _timed_prompt(server, FIRST_NUM_WORDS)
        longest = MAX_NUM_WORDS if server.max_tokens is None else server.max_tokens // MAX_TOKENS_PER_WORD
        num_words = max(FIRST_NUM_WORDS, int(FIRST_NUM_WORDS * TIMED_S / max(elapsed_s, 1e-3)))
        num_tokens, elapsed_s = _timed_prompt(server, min(MAX_NUM_WORDS, longest, num_words))
        return num_tokens / max(elapsed_s, 1e-3)
    return None


def _timed_prompt(server: Server, num_words: int) -> tuple[int, float]:
    """Send a prompt of random words; return its number of tokens, and the seconds until its only output token."""
    import asyncio  # imported late, like quire.http_client, because both import slowly

    from quire.cli.chat.remote import server_at
    from quire.http_client import OK, fetch

    prompt = " ".join(secrets.token_hex(2) for _ in range(num_words))
    body = json.dumps({"model": server.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
    started_s = perf_counter()
    request = fetch(server_at(server.url, server.key), "POST", "/v1/completions", body, timeout_s=TIMEOUT_S)
    status, answer = asyncio.run(request)
    elapsed_s = perf_counter() - started_s
    if status != OK:
        raise MessageError(f"expected status {OK} for a timed prompt, got {status}")
    return int(json.loads(answer)["usage"]["prompt_tokens"]), elapsed_s


# -- the estimate ------------------------------------------------------------------------------------------------------


def start_line(server: Server, root: str, client: AgentClient, speeds: PromptSpeeds) -> str:
    """Return the line before the agent starts: the address, and how long its first prompt takes, if that is known."""
    line = f"{server.model} at {server.url}"
    speed = speeds.by_model.get(root)
    if speed is None:
        return line
    needed_s = client.num_first_tokens / speed
    line += (
        f"; {client.name}'s first prompt has up to {client.num_first_tokens:,} tokens: up to "
        f"{duration_text(needed_s)} at {speed:,.0f} tokens/s"
    )
    choices = [f"{name}: {duration_text(choice_s)}" for name, choice_s in smaller_choices(client, root, speeds)]
    line += f" ({', '.join(choices)})" if choices else ""
    return line + (f"; {client.name} with this model is slow on this machine" if needed_s > SLOW_S else "")


def smaller_choices(client: AgentClient, root: str, speeds: PromptSpeeds) -> Iterator[tuple[str, float]]:
    """Yield the next smaller agent with this model, and the fastest other model on this machine with this agent, with
    the seconds of their first prompts. Each takes at most half as long."""
    needed_s = client.num_first_tokens / speeds.by_model[root]
    half_s = needed_s / 2
    agents = ((other.name, other.num_first_tokens / speeds.by_model[root]) for other in AGENTS.values())
    yield from _longest(choice for choice in agents if choice[1] <= half_s)
    models = (
        (model_name(other), client.num_first_tokens / speed)
        for other, speed in speeds.by_model.items()
        if other != root and _is_here(other)
    )
    fast = sorted((choice for choice in models if choice[1] <= half_s), key=lambda choice: choice[1])
    yield from fast[:1]


def _longest(choices: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(choices, key=lambda choice: -choice[1])[:1]


def _is_here(model: str) -> bool:
    """Whether a model can still be loaded: a path may be gone, a hub id is never checked."""
    return not os.path.isabs(model) or os.path.exists(model)


def model_name(root: str) -> str:
    """Return a short name of a model for a line: the last part of its path, or its hub id."""
    return (os.path.basename(root.rstrip("/")) if os.path.isabs(root) else root).removesuffix(".gguf")


def duration_text(seconds: float) -> str:
    """Format a duration for a person: `40 s`, `3 min`, `1 h 20 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
