"""Members in separate network namespaces, and functions that break the link between them and a gateway outside.

    gateway (here)  10.231.N.1 ── veth ── 10.231.N.2  member N     drop rules of nftables on this side
    gateway (here)  10.232.N.1 ── tun ─ forwarder ─ tun ── 10.232.N.2  member N     every packet 50 ms later

Needs root, `ip` and `nft`. All devices and rules are created for a run and deleted after it.
"""

import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.machine.spawned import MEMBER_AT, in_checkout, spawned

PORT, EVENTS_PORT, REPLAY_PORT = 7000, 7001, 7002
DELAY_S = 0.05
TABLE = "quire_proof"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MAX_PACKET = 65_536


def run(*words: str) -> None:
    """Run a system command. Raises RuntimeError with its stderr."""
    process = subprocess.run(words, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)}: {process.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class FarMember:
    """A member in its own network namespace."""

    number: int
    process: "subprocess.Popen[bytes]"
    host: str

    @property
    def address(self) -> str:
        """The member's address for a gateway on this side."""
        return f"tcp://{self.host}:{PORT}"

    @property
    def wire(self) -> str:
        """The network device on this side."""
        return f"qf{self.number}"


@contextmanager
def far_members(count: int, step_s: float, keys: Path, *, is_slow: bool = False) -> Iterator[list[FarMember]]:
    """Start members, each in a namespace; with `is_slow` every packet in either direction takes 50 ms longer."""
    with ExitStack() as stack:
        stack.callback(_quietly, "nft", "delete", "table", "inet", TABLE)
        yield [stack.enter_context(_far_member(number, step_s, keys, is_slow=is_slow)) for number in range(count)]


@contextmanager
def _far_member(number: int, step_s: float, keys: Path, *, is_slow: bool) -> Iterator[FarMember]:
    space, near, far = f"quire-proof-{number}", f"qf{number}", f"qg{number}"
    net = f"10.{232 if is_slow else 231}.{number}"
    _quietly("ip", "netns", "del", space)
    run("ip", "netns", "add", space)
    with ExitStack() as stack:
        stack.callback(_quietly, "ip", "netns", "del", space)
        stack.callback(_quietly, "ip", "link", "del", near)
        if is_slow:
            stack.enter_context(_forwarder(space, near, far))
        else:
            run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
            run("ip", "link", "set", far, "netns", space)
        run("ip", "addr", "add", f"{net}.1/24", "dev", near)
        run("ip", "link", "set", near, "up")
        run("ip", "-n", space, "addr", "add", f"{net}.2/24", "dev", far)
        run("ip", "-n", space, "link", "set", far, "up")
        run("ip", "-n", space, "link", "set", "lo", "up")
        addresses = [f"tcp://{net}.2:{port}" for port in (PORT, EVENTS_PORT, REPLAY_PORT)]
        command = [
            sys.executable,
            "-m",
            "tests.support.fleet.oracle_member",
            addresses[0],
            str(step_s),
            str(keys),
            *addresses[1:],
        ]
        member = stack.enter_context(spawned(["ip", "netns", "exec", space, *command], None, in_checkout(), stops_s=0))
        member.wait_for(MEMBER_AT)
        yield FarMember(number, member.process, f"{net}.2")


@contextmanager
def _forwarder(space: str, near: str, far: str) -> Iterator[None]:
    command = [sys.executable, "-m", "proofs.fleet.namespaces", space, near, far]
    with spawned(command, None, in_checkout(), stops_s=0) as one:
        one.wait_for("(forwarding)")
        yield


@contextmanager
def dropping(*rules: str) -> Iterator[None]:
    """Silently drop packets that match these rules. `in` and `out` are directions as seen from this side."""
    _quietly("nft", "delete", "table", "inet", TABLE)
    run("nft", "add", "table", "inet", TABLE)
    for name, hook in (("in", "input"), ("out", "output")):
        run("nft", f"add chain inet {TABLE} {name} {{ type filter hook {hook} priority 0 ; }}")
    for rule in rules:
        chain, _, match = rule.partition(" ")
        run("nft", f"add rule inet {TABLE} {chain} {match} drop")
    try:
        yield
    finally:
        _quietly("nft", "delete", "table", "inet", TABLE)


def _quietly(*words: str) -> None:
    subprocess.run(words, capture_output=True, check=False)


# -- the forwarder: a separate process ---------------------------------------------------------------------------------


def tun(name: str) -> int:
    """Open a TUN device in the namespace of this thread, and return its descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def forward(devices: Sequence[int]) -> None:
    """Forward packets between both devices with a delay."""
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        until_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for device in select.select(devices, (), (), until_s)[0]:
            packet = os.read(device, MAX_PACKET)
            number += 1
            other = devices[1 - devices.index(device)]
            heapq.heappush(waiting, (time.monotonic() + DELAY_S, number, other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, other, packet = heapq.heappop(waiting)
            with suppress(OSError):  # the member has ended
                os.write(other, packet)


def main(space: str, near: str, far: str) -> None:
    """Create one device here and the other in the namespace, and forward between them."""
    near_device = tun(near)
    with open(f"/run/netns/{space}") as namespace_file:
        if ctypes.CDLL(None, use_errno=True).setns(namespace_file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")
    far_device = tun(far)
    sys.stderr.write("forwarding\n")
    sys.stderr.flush()
    forward((near_device, far_device))


if __name__ == "__main__":
    main(*sys.argv[1:])
