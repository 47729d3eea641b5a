"""Parses the address of an OpenAI member, one line of the member list.

    openai:http://10.0.0.7:8000 events=tcp://10.0.0.7:5557 replay=tcp://10.0.0.7:5558 key-file=/etc/quire/gpu.key

Connections to such a server may be unencrypted and carry prompts, so an unencrypted address on another machine is
accepted only if the operator allows it. Reads key files; opens no socket.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from quire.errors import ConfigError
from quire.fleet.protocol.keys import is_loopback

OPENAI_PREFIX = "openai:"
"""Prefix of the addresses of OpenAI members."""
KEY_VARIABLE = "QUIRE_STRANGER_KEY"
"""Environment variable with the API key for members without a key file."""
OPTIONS = ("events", "replay", "key-file", "model")
SCHEMES = {"http": 80, "https": 443}
EVENT_KINDS = ("tcp://", "ipc://")


@dataclass(frozen=True, slots=True)
class OpenAIAddress:
    """A parsed address line."""

    line: str
    """The unparsed line, which identifies the member."""
    host: str
    port: int
    has_tls: bool = False
    path: str = ""
    """URL prefix of the API's paths."""
    events: str = ""
    """Endpoint of the server's KV events; empty if it publishes none."""
    replay: str = ""
    key_file: Path | None = None
    model: str = ""
    """The server's id of the model; empty: the first model that the server lists."""

    @property
    def is_clear(self) -> bool:
        """Whether unencrypted connections leave this machine."""
        is_api_clear = not self.has_tls and not is_loopback(f"http://{self.authority}")
        return is_api_clear or any(not is_loopback(endpoint) for endpoint in (self.events, self.replay) if endpoint)

    @property
    def authority(self) -> str:
        """Host and port as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_openai(address: str) -> bool:
    """Whether an address in the member list is that of an OpenAI server."""
    return address.startswith(OPENAI_PREFIX)


def parse_openai_address(line: str) -> OpenAIAddress:
    """Parse an address line. Raises ConfigError if it is invalid."""
    url, *fields = line.removeprefix(OPENAI_PREFIX).split()
    options = dict[str, str]()
    for field in fields:
        name, _, value = field.partition("=")
        if name not in OPTIONS or not value or name in options:
            message = f"expected {', '.join(f'{option}=…' for option in OPTIONS)}, each at most once, after openai:URL"
            raise ConfigError(f"{message}, got {field!r}", code="invalid_member_option")
        options[name] = value
    for name in ("events", "replay"):
        if name in options and not options[name].startswith(EVENT_KINDS):
            message = f"expected {name} to begin with {' or '.join(EVENT_KINDS)}, got {options[name]!r}"
            raise ConfigError(message, (name,))
    if "replay" in options and "events" not in options:
        raise ConfigError(f"expected events with replay, got none in {line!r}; add events=", ("replay",))
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
        message = f"expected an OpenAI member as openai:http://HOST:PORT, got {url!r}: {error}"
        raise ConfigError(message, code="invalid_member_address") from error
    has_other_parts = parts.query or parts.fragment or parts.username is not None or parts.password is not None
    if parts.scheme not in SCHEMES or not parts.hostname or has_other_parts:
        message = "expected an OpenAI member as openai:http://HOST:PORT or openai:https://HOST:PORT"
        details = f"{message}, got {OPENAI_PREFIX}{url!r}; pass its key in a file: key-file=PATH"
        raise ConfigError(details, code="invalid_member_address")
    return parts, SCHEMES[parts.scheme] if port is None else port


def check_openai_request(address: OpenAIAddress, *, allows_clear: bool) -> None:
    """Raise ConfigError for an unencrypted address on another machine, unless `allows_clear`."""
    if address.is_clear and not allows_clear:
        message = f"expected an encrypted connection to an OpenAI member on another host, got {address.line!r}"
        hint = "use https, or pass --allow-clear-member if only you use the network"
        raise ConfigError(f"{message}; {hint}", code="unencrypted_member")


def read_key(address: OpenAIAddress) -> str | None:
    """Return the API key for the server, or None without one. Raises ConfigError, which never contains a key."""
    if address.key_file is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
    else:
        try:
            key = address.key_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            message = f"cannot read the key of a member from {address.key_file}: {type(error).__name__}; check the path"
            raise ConfigError(message, code="key_not_readable") from error
    if not key.isascii() or not key.isprintable() or " " in key:
        source = address.key_file or f"${KEY_VARIABLE}"
        message = f"expected a key of printable ASCII without spaces in {source}, got other characters; correct it"
        raise ConfigError(message, code="invalid_key")
    return key or None
