"""Who is meant to be a member: a file that may change, a name that resolves to addresses, or a fixed list.

    # members.txt: one address a line
    tcp://10.0.0.5:7000
    tcp://10.0.0.6:7000
    openai:http://10.0.0.7:8000     # one that is not quire; see stranger_address

A source that cannot be read at this moment, or names nobody, says nothing, and who is there stays: membership freezes,
traffic goes on.
"""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.errors import ConfigError
from quire.fleet.openai.address import STRANGER, is_stranger, parse_stranger

KINDS = ("tcp://", "ipc://", f"{STRANGER}http://", f"{STRANGER}https://")
DEFAULT_PORT = 7000
MAX_PORT = 65535


class MemberSource(Protocol):
    """Knows who is meant to be a member now."""

    async def addresses(self) -> Sequence[str]:
        """All of them, at least one. Raises ConfigError if that cannot be told at this moment."""
        ...


@dataclass(frozen=True, slots=True)
class FixedMembers:
    """Always the same."""

    given: Sequence[str]

    async def addresses(self) -> Sequence[str]:
        """See `MemberSource`."""
        return self.given


@dataclass(frozen=True, slots=True)
class ListedMembers:
    """Those that a file lists; it is read again and again."""

    file: Path

    async def addresses(self) -> Sequence[str]:
        """See `MemberSource`."""
        return read_list(self.file)


@dataclass(frozen=True, slots=True)
class NamedMembers:
    """All addresses of a host name, such as a headless service of Kubernetes has."""

    host: str
    port: int

    async def addresses(self) -> Sequence[str]:
        """See `MemberSource`."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"members by name need a name that resolves, {self.host!r} does not: {error}") from error
        hosts = sorted({str(one[4][0]) for one in found})
        return [f"tcp://[{host}]:{self.port}" if ":" in host else f"tcp://{host}:{self.port}" for host in hosts]


def parse_source(given: str) -> MemberSource:
    """`dns:NAME[:PORT]`, or a file. Raises ConfigError."""
    if given.startswith("dns:"):
        host, _, port = given.removeprefix("dns:").partition(":")
        if not host or not (port or "1").isdecimal() or not 1 <= int(port or DEFAULT_PORT) <= MAX_PORT:
            raise ConfigError(
                f"members by name are dns:NAME or dns:NAME:PORT with a port up to {MAX_PORT}, {given!r} given"
            )
        return NamedMembers(host, int(port or DEFAULT_PORT))
    read_list(Path(given))
    return ListedMembers(Path(given))


def read_list(file: Path) -> list[str]:
    """The addresses in a file. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the list of members {file} cannot be read: {error}; give a file or dns:NAME") from error
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    addresses = list(dict.fromkeys(filter(None, lines)))
    for address in addresses:
        if not address.startswith(KINDS):
            raise ConfigError(f"a member's address begins with {' or '.join(KINDS)}, {address!r} in {file} does not")
        if is_stranger(address):
            parse_stranger(address)
    if not addresses:
        raise ConfigError(f"a list of members has at least one address, {file} has none; write one a line")
    return addresses
