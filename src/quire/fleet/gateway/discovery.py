"""Sources of member addresses: a file, a DNS name (both are read again each second), or a fixed list.

    # members.txt: one address per line
    tcp://10.0.0.5:7000
    tcp://10.0.0.6:7000
    openai:http://10.0.0.7:8000     # an OpenAI server; see `openai.address`

If a source cannot be read or is empty, the gateway keeps its current members and continues to serve requests.
"""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.errors import ConfigError
from quire.fleet.openai.address import OPENAI_PREFIX, is_openai, parse_openai_address

PREFIXES = ("tcp://", "ipc://", f"{OPENAI_PREFIX}http://", f"{OPENAI_PREFIX}https://")
DEFAULT_PORT = 7000
MAX_PORT = 65535


class MemberSource(Protocol):
    """Lists the addresses of the members."""

    async def addresses(self) -> Sequence[str]:
        """Return all addresses, at least one. Raises ConfigError if they cannot be read now."""


@dataclass(frozen=True, slots=True)
class FixedMembers:
    """A fixed list of addresses."""

    member_addresses: Sequence[str]

    async def addresses(self) -> Sequence[str]:
        return self.member_addresses


@dataclass(frozen=True, slots=True)
class ListedMembers:
    """A list in a file, which is read on every call."""

    file: Path

    async def addresses(self) -> Sequence[str]:
        return read_list(self.file)


@dataclass(frozen=True, slots=True)
class NamedMembers:
    """All IP addresses of a host name, for example of a headless Kubernetes service, with one port."""

    host: str
    port: int

    async def addresses(self) -> Sequence[str]:
        try:
            results = await asyncio.get_running_loop().getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"cannot resolve {self.host!r}: {error}; check the name after dns:") from error
        hosts = sorted({str(result[4][0]) for result in results})
        return [f"tcp://[{host}]:{self.port}" if ":" in host else f"tcp://{host}:{self.port}" for host in hosts]


def parse_source(text: str) -> MemberSource:
    """Parse `dns:NAME[:PORT]` or the path of a file. Raises ConfigError."""
    if text.startswith("dns:"):
        host, _, port = text.removeprefix("dns:").partition(":")
        if not host or not (port or "1").isdecimal() or not 1 <= int(port or DEFAULT_PORT) <= MAX_PORT:
            raise ConfigError(f"expected dns:NAME or dns:NAME:PORT with a port up to {MAX_PORT}, got {text!r}")
        return NamedMembers(host, int(port or DEFAULT_PORT))
    read_list(Path(text))
    return ListedMembers(Path(text))


def read_list(file: Path) -> list[str]:
    """Return the addresses in a file. Raises ConfigError if it is unreadable, empty or has an invalid address."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the member list {file}: {error}; pass a readable file, or dns:NAME") from error
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    addresses = list(dict.fromkeys(filter(None, lines)))
    for address in addresses:
        if not address.startswith(PREFIXES):
            raise ConfigError(f"expected addresses with {' or '.join(PREFIXES)}, got {address!r} in {file}")
        if is_openai(address):
            parse_openai_address(address)
    if not addresses:
        raise ConfigError(f"expected at least one address in {file}, got none; write one per line")
    return addresses
