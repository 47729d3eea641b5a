"""Access control of a fleet: one CURVE key pair for all members and one for all gateways, created once.

    member.json     the members' secret key, and the public keys of accepted gateways
    gateway.json    the gateways' secret key, and the members' public key

All traffic between machines is encrypted: without keys, only loopback and IPC addresses are accepted.
"""

import asyncio
import ipaddress
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from quire.errors import ConfigError

MEMBER_FILE, GATEWAY_FILE = "member.json", "gateway.json"
ZAP_DOMAIN = b"quire"
CurveKey = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]
"""A key in Z85 encoding."""


@dataclass(frozen=True, slots=True)
class MemberKeys:
    """The keys of a member."""

    public: CurveKey
    secret: CurveKey = field(repr=False)
    gateways: tuple[CurveKey, ...] = ()
    """Public keys of accepted gateways."""


@dataclass(frozen=True, slots=True)
class GatewayKeys:
    """The keys of a gateway."""

    public: CurveKey
    secret: CurveKey = field(repr=False)
    member: CurveKey
    """The members' public key."""


_Keys = TypeVar("_Keys", MemberKeys, GatewayKeys)


def make_keys(folder: Path) -> tuple[Path, Path]:
    """Write two files with new matching keys, readable by their owner only. Raises ConfigError if one exists."""
    member_pair, gateway_pair = _new_key_pair(), _new_key_pair()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = folder / MEMBER_FILE, folder / GATEWAY_FILE
    existing = [file for file in files if file.exists()]
    if existing:
        message = f"{existing[0]} exists already, and keys are never overwritten; choose another folder, or remove it"
        raise ConfigError(message, code="keys_exist")
    _write(files[0], MemberKeys(*member_pair, (gateway_pair[0],)))
    _write(files[1], GatewayKeys(*gateway_pair, member_pair[0]))
    return files


def read_member_keys(file: Path) -> MemberKeys:
    """Read a member's key file. Raises ConfigError."""
    return _read(file, MemberKeys)


def read_gateway_keys(file: Path) -> GatewayKeys:
    """Read a gateway's key file. Raises ConfigError."""
    return _read(file, GatewayKeys)


def check_keys(address: str, *, has_keys: bool) -> None:
    """Raise ConfigError if there are no keys for an address that other machines can reach."""
    if not has_keys and not is_loopback(address):
        message = f"expected fleet keys for {address}, which other machines can reach, got none"
        hint = "create keys with `quire fleet keys FOLDER` and pass them with --fleet-keys"
        raise ConfigError(f"{message}; {hint}", code="fleet_keys_missing")


def is_loopback(address: str) -> bool:
    """Whether an endpoint is reachable from this machine only."""
    scheme, _, rest = address.partition("://")
    if scheme in ("ipc", "inproc"):
        return True
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _GatewayCredentials:
    """ZMQ credentials provider that accepts the keys in `MemberKeys.gateways`."""

    def __init__(self, keys: MemberKeys) -> None:
        self._accepted = {key.encode() for key in keys.gateways}

    def callback(self, _domain: str, key: bytes) -> bool:
        return key in self._accepted


def start_authenticator(context: zmq.asyncio.Context, keys: MemberKeys) -> AsyncioAuthenticator:
    """Start an authenticator that accepts gateways with known keys on all `secure_member` sockets of the context."""
    authenticator = AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(ZAP_DOMAIN.decode(), credentials_provider=_GatewayCredentials(keys))
    return authenticator


def secure_member(socket: zmq.asyncio.Socket, keys: MemberKeys | None) -> None:
    """Enable CURVE on a member's socket, if there are keys. Call before `bind`."""
    if keys is not None:
        socket.curve_secretkey, socket.curve_publickey = keys.secret.encode(), keys.public.encode()
        socket.curve_server = True
        socket.zap_domain = ZAP_DOMAIN


def secure_gateway(socket: zmq.asyncio.Socket, keys: GatewayKeys | None) -> None:
    """Enable CURVE on a gateway's socket, if there are keys. Call before `connect`."""
    if keys is not None:
        socket.curve_secretkey, socket.curve_publickey = keys.secret.encode(), keys.public.encode()
        socket.curve_serverkey = keys.member.encode()


def set_options(socket: zmq.asyncio.Socket, address: str, *options: tuple[int, int]) -> None:
    """Set the options common to all sockets between gateways and members, then `options`."""
    common = (zmq.LINGER, 0), (zmq.HEARTBEAT_IVL, 1000), (zmq.HEARTBEAT_TIMEOUT, 4000), (zmq.IPV6, int("[" in address))
    for option, value in (*common, *options):
        socket.setsockopt(option, value)


def was_sent(future: object) -> bool:
    """Whether an asyncio socket accepted a message sent with DONTWAIT; if so, its future is done at once."""
    return isinstance(future, asyncio.Future) and future.done() and future.exception() is None


def _new_key_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _write(file: Path, keys: MemberKeys | GatewayKeys) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        json.dump(asdict(keys), out, indent=1)


def _read(file: Path, kind: type[_Keys]) -> _Keys:
    try:
        return msgspec.convert(json.loads(file.read_text(encoding="utf-8")), kind)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        message = f"expected fleet keys in {file}: {error}; create keys with `quire fleet keys FOLDER`"
        raise ConfigError(message) from error
