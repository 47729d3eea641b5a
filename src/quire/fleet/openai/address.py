"""An OpenAI member, as a line of the list of members.

    openai:http://10.0.0.7:8000 events=tcp://10.0.0.7:5557 replay=tcp://10.0.0.7:5558 key-file=/etc/quire/gpu.key

Messages of such a server may be unencrypted, prompts among them. So a line that leads beyond this machine is accepted
only where the operator allows it. Reads key files; opens no socket.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from quire.errors import ConfigError
from quire.fleet.protocol.keys import is_loopback

OPENAI_PREFIX = "openai:"
"""How lines of such members begin."""
KEY_VARIABLE = "QUIRE_STRANGER_KEY"
"""The environment's key for members without a key file."""
OPTIONS = ("events", "replay", "key-file", "model")
SCHEMES = {"http": 80, "https": 443}
EVENT_KINDS = ("tcp://", "ipc://")


@dataclass(frozen=True, slots=True)
class OpenAIAddress:
    """One line, parsed."""

    line: str
    """As it was written: the member's name."""
    host: str
    port: int
    has_tls: bool = False
    path: str = ""
    """What comes before the paths of the API."""
    events: str = ""
    """Where it publishes KV events; empty: nowhere."""
    replay: str = ""
    key_file: Path | None = None
    model: str = ""
    """Its name of the model; empty: the first that it lists."""

    @property
    def is_clear(self) -> bool:
        """Whether other machines could read the messages."""
        speaks_clear = not self.has_tls and not is_loopback(f"http://{self.authority}")
        return speaks_clear or any(not is_loopback(one) for one in (self.events, self.replay) if one)

    @property
    def authority(self) -> str:
        """Host and port as a URL writes them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_openai(address: str) -> bool:
    """Whether an address in the list of members is that of an OpenAI server."""
    return address.startswith(OPENAI_PREFIX)


def parse_openai_address(line: str) -> OpenAIAddress:
    """Raises ConfigError for an invalid line."""
    url, *fields = line.removeprefix(OPENAI_PREFIX).split()
    options = dict[str, str]()
    for text in fields:
        name, _, value = text.partition("=")
        if name not in OPTIONS or not value or name in options:
            raise ConfigError(
                f"behind its address a member that is not quire has {', '.join(f'{one}=…' for one in OPTIONS)}, each "
                f"at most once; {text!r} given"
            )
        options[name] = value
    for name in ("events", "replay"):
        if name in options and not options[name].startswith(EVENT_KINDS):
            raise ConfigError(f"{name} begins with {' or '.join(EVENT_KINDS)}, {options[name]!r} given")
    if "replay" in options and "events" not in options:
        raise ConfigError(f"replay needs events: what was missed is of what is told there; {line!r} has none")
    parts, port = _split(url)
    return OpenAIAddress(
        line,
        parts.hostname or "",
        port,
        parts.scheme == "https",
        parts.path.rstrip("/").removesuffix("/v1"),
        options.get("events", ""),
        options.get("replay", ""),
        Path(options["key-file"]) if "key-file" in options else None,
        options.get("model", ""),
    )


def _split(url: str) -> tuple[SplitResult, int]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"a member that is not quire is openai:http://HOST:PORT, {url!r} given: {error}") from error
    has_more = parts.query or parts.fragment or parts.username is not None or parts.password is not None
    if parts.scheme not in SCHEMES or not parts.hostname or has_more:
        raise ConfigError(
            f"a member that is not quire is openai:http://HOST:PORT or openai:https://HOST:PORT, "
            f"{OPENAI_PREFIX}{url!r} given; its key goes into a file: key-file=PATH"
        )
    return parts, SCHEMES[parts.scheme] if port is None else port


def check_openai_request(address: OpenAIAddress, *, allows_clear: bool) -> None:
    """Raise ConfigError for one that is reached unencrypted beyond this machine, unless that is allowed."""
    if address.is_clear and not allows_clear:
        raise ConfigError(
            f"a member that is not quire is spoken to in clear, so only on this machine; {address.line!r} leads beyond "
            "it; use https, or give --allow-clear-member if the network between is yours alone"
        )


def read_key(address: OpenAIAddress) -> str | None:
    """The server's API key; None: it needs none. Raises ConfigError, which never shows a key."""
    if address.key_file is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
    else:
        try:
            key = address.key_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"the key of a member must be in {address.key_file}: {type(error).__name__}") from error
    if not key.isascii() or not key.isprintable() or " " in key:
        where = address.key_file or f"${KEY_VARIABLE}"
        raise ConfigError(f"a key is one word of printable ASCII, {where} holds something else; write it anew")
    return key or None
