"""What no gateway says, or not in this way: messages that were spoilt, and bytes of other protocols."""

import socket
from random import Random

import msgspec

from quire.engine import commands
from quire.engine.calls import EngineCall, Explain
from quire.engine.commands import Cancel, ClearCache
from quire.fleet.protocol.messages import PROTOCOL, Assign, GatewayBeat, GoodbyeAck, Hello, RequestTextAssets
from tests.support.machine.patience import PATIENCE_S
from tests.support.workers.messages import REQUEST, assigned

TO_MEMBER: list[msgspec.Struct] = [
    Hello(PROTOCOL, "gateway"),
    GatewayBeat(),
    RequestTextAssets(),
    GoodbyeAck(),
    Assign(assigned(commands.Submit, REQUEST), 3),
    Assign(assigned(commands.Restore, REQUEST), 0),
    Cancel("a", 1),
    EngineCall(1, Explain(REQUEST.namespace, (1, 2, 3))),
    ClearCache(),
]
"""One of each kind."""


def spoilt(random: Random, data: bytes) -> bytes:
    """A message with some bytes changed, lost, doubled or added."""
    made = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(made)) if made else 0
        match random.randrange(5):
            case 0:
                made[at : at + 1] = random.randbytes(1)
            case 1:
                del made[at : at + random.randint(1, 8)]
            case 2:
                made[at:at] = random.randbytes(random.randint(1, 8))
            case 3:
                made[at:at] = made[at : at + random.randint(1, 30)]
            case 4:
                made[at : at + 1] = random.choice(
                    (b"\xcb\x7f\xf8" + bytes(6), b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7))
                )
    return bytes(made)


def plain_bytes(address: str, data: bytes) -> bytes:
    """What a member answers to who speaks another protocol, or only half of its own."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as wire:
        heard = b""
        try:
            wire.sendall(data)
            wire.shutdown(socket.SHUT_WR)
            while more := wire.recv(4096):
                heard += more
        except OSError:
            pass  # whoever answers so has closed the wire already
        return heard
