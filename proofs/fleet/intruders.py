"""Whoever has no right to speak to a member, and whoever has and says what is no message.

A member with keys and its three sockets (messages, events, replays); a gateway that is served all the while.
"""

import asyncio
import socket
from collections.abc import Sequence
from random import Random

import zmq
import zmq.asyncio

from proofs.framework.proof import Proof, section
from quire.client.request.params import SamplingParams
from quire.fleet.gateway.client import FleetModel
from quire.fleet.gateway.discovery import FixedMembers
from quire.fleet.protocol.keys import (
    GatewayKeys,
    MemberKeys,
    make_keys,
    read_gateway_keys,
    read_member_keys,
    secure_gateway,
)
from quire.fleet.protocol.messages import PROTOCOL, Hello, encode_fleet_message
from quire.worker.child.kv_snapshot import POSITION, SNAPSHOT
from tests.support.fleet.small_fleets import SmallMember, small_fleet, small_member
from tests.support.workers.breakable_wires import wire_to
from tests.support.workers.strange_messages import TO_MEMBER, plain_bytes, spoilt

SHORT = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
SILENT_MS = 300


@section("intruders")
async def intruders(proof: Proof) -> None:
    """What was accepted of those without a right, and what fell over because of those with one."""
    member_file, gateway_file = make_keys(proof.folder / "right")
    _, strange_file = make_keys(proof.folder / "strange")
    right, strange = read_gateway_keys(gateway_file), read_gateway_keys(strange_file)
    # Who knows the members' public key, which is no secret, and not the gateways' secret.
    unknown = GatewayKeys(strange.public, strange.secret, right.member)
    keys = read_member_keys(member_file)
    async with small_fleet(1, member_keys=keys, gateway_keys=right) as (model, members):
        member, context = members[0], zmq.asyncio.Context()
        expected = (await model.generate("once", SHORT)).answers[0].token_ids
        num_accepted = await _without_right(context, member, (None, strange, unknown))
        num_accepted += await _said_again(member, right)
        num_sent = await _no_messages(context, member, right, proof.random, proof.sized(quick=3_000, full=50_000))
        num_served = sum(
            [(await model.generate("once", SHORT)).answers[0].token_ids == expected for _ in range(20)], start=0
        )
        num_crashes = member.supervisor.num_restarts + (20 - num_served)
        num_malformed = member.server.num_malformed
        context.destroy(linger=0)
    num_accepted += await _foreign(right, keys)
    proof.equals("intruders", num_accepted, 0, "accepted")
    proof.equals("intruders_crashes", num_crashes, 0, f"after {num_sent:,} messages, {num_malformed:,} of them strange")


def _socket(context: zmq.asyncio.Context, kind: int, address: str, keys: GatewayKeys | None) -> zmq.asyncio.Socket:
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.SNDHWM, 0)
    secure_gateway(made, keys)
    if kind == zmq.SUB:
        made.subscribe(b"")
    made.connect(address)
    return made


async def _without_right(context: zmq.asyncio.Context, member: SmallMember, keys: Sequence[GatewayKeys | None]) -> int:
    """How many of them were answered on any of the three sockets."""
    sockets = []
    for one in keys:
        asking = _socket(context, zmq.DEALER, member.address, one)
        hearing = _socket(context, zmq.SUB, member.relay.events, one)
        replaying = _socket(context, zmq.DEALER, member.relay.replay, one)
        for _ in range(20):
            await asking.send(encode_fleet_message(Hello(PROTOCOL, "intruder")))
            await replaying.send_multipart([b"", SNAPSHOT])
            await replaying.send_multipart([b"", POSITION])
        sockets += [asking, hearing, replaying]
    num_gateways = 0 if member.server.service is None else member.server.service.num_gateways
    answered = [bool(await one.poll(SILENT_MS)) for one in sockets]
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" + bytes(8) + b"\x7f\x03", Random(1).randbytes(500)):
        for address in (member.address, member.relay.events, member.relay.replay):
            heard = await asyncio.to_thread(plain_bytes, address, data)
            answered.append(b"oracle" in heard)
    return sum(answered) + (num_gateways != 1)


async def _said_again(member: SmallMember, right: GatewayKeys) -> int:
    """A handshake that was overheard, byte for byte, on a connection of its own."""
    async with (
        wire_to(member.address) as (wire, address),
        FleetModel("oracle", FixedMembers([address]), right) as overheard,
    ):
        await overheard.generate("overheard", SHORT)
        heard = bytes(wire.overheard)
    desk = member.server.service
    num_before = 0 if desk is None else desk.num_gateways
    host, _, port = member.address.removeprefix("tcp://").rpartition(":")

    def say_again() -> bytes:
        with socket.create_connection((host, int(port)), timeout=10) as again:
            again.sendall(heard)
            again.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while more := again.recv(4096):
                    answer += more
            except (ConnectionError, TimeoutError):
                pass
            return answer

    answer = await asyncio.to_thread(say_again)
    num_after = 0 if desk is None else desk.num_gateways
    return (num_after > num_before) + (b"oracle" in answer) + (not heard)


async def _no_messages(
    context: zmq.asyncio.Context, member: SmallMember, right: GatewayKeys, random: Random, count: int
) -> int:
    """From somebody with the right keys: bytes of all kinds on all three sockets."""
    asking = _socket(context, zmq.DEALER, member.address, right)
    replaying = _socket(context, zmq.DEALER, member.relay.replay, right)
    await asking.send(encode_fleet_message(Hello(PROTOCOL, "intruder")))
    for number in range(count):
        data = spoilt(random, encode_fleet_message(random.choice(TO_MEMBER[1:])))
        if number % 4:
            await asking.send(data)
        else:
            frames = random.choice(([b"", data], [b"", random.randbytes(8)], [data], [b"", b"", b"", data], [b"", b""]))
            await replaying.send_multipart(frames)
        if number % 100 == 99:
            await asyncio.sleep(0)
            while await asking.poll(0):
                await asking.recv_multipart()
            while await replaying.poll(0):
                await replaying.recv_multipart()
    num_malformed = -1
    while num_malformed != member.server.num_malformed:
        num_malformed = member.server.num_malformed
        await asyncio.sleep(0.5)
    return count


async def _foreign(right: GatewayKeys, keys: MemberKeys) -> int:
    """A member of another model under the same name gets nothing."""
    async with (
        small_member(keys=keys) as own,
        small_member(keys=keys, fingerprint="another") as other,
        FleetModel("oracle", FixedMembers([own.address]), right) as model,
    ):
        model.source = FixedMembers([own.address, other.address])
        for number in range(20):
            await model.generate(f"{number} begins", SHORT)
            await asyncio.sleep(0.1)
        is_refused = "same model" in model.links[other.address].problem
        return (not is_refused) + (other.address in model.fleet.members) + (other.supervisor.ledger.num_progress > 0)
