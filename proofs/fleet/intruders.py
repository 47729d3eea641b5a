"""Attacks on a member: by peers without the right keys, and malformed messages by peers with the right keys.

The member has keys and three sockets (messages, events, replays), and serves a gateway during all attacks.
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
    """Count accepted attacks of peers without keys, and crashes caused by peers with keys."""
    member_file, gateway_file = make_keys(proof.folder / "right")
    _, strange_file = make_keys(proof.folder / "strange")
    right, strange = read_gateway_keys(gateway_file), read_gateway_keys(strange_file)
    # A peer that knows the members' public key, which is not secret, but not the gateways' secret key.
    unknown = GatewayKeys(strange.public, strange.secret, right.member)
    keys = read_member_keys(member_file)
    async with small_fleet(1, member_keys=keys, gateway_keys=right) as (model, members):
        member, context = members[0], zmq.asyncio.Context()
        expected = (await model.generate("once", SHORT)).answers[0].token_ids
        num_accepted = await _intrude(context, member, (None, strange, unknown))
        num_accepted += await _replay_handshake(member, right)
        num_sent = await _send_malformed(context, member, right, proof.random, proof.sized(quick=3_000, full=50_000))
        num_served = sum(
            [(await model.generate("once", SHORT)).answers[0].token_ids == expected for _ in range(20)], start=0
        )
        num_crashes = member.supervisor.num_restarts + (20 - num_served)
        num_malformed = member.server.num_malformed
        context.destroy(linger=0)
    num_accepted += await _add_foreign_member(right, keys)
    proof.equals("intruders", num_accepted, 0, "accepted")
    proof.equals("intruders_crashes", num_crashes, 0, f"after {num_sent:,} messages, {num_malformed:,} malformed")


def _socket(context: zmq.asyncio.Context, kind: int, address: str, keys: GatewayKeys | None) -> zmq.asyncio.Socket:
    socket_ = context.socket(kind)
    socket_.setsockopt(zmq.LINGER, 0)
    socket_.setsockopt(zmq.SNDHWM, 0)
    secure_gateway(socket_, keys)
    if kind == zmq.SUB:
        socket_.subscribe(b"")
    socket_.connect(address)
    return socket_


async def _intrude(context: zmq.asyncio.Context, member: SmallMember, keys: Sequence[GatewayKeys | None]) -> int:
    """Count sockets of peers without the right keys that got an answer."""
    sockets = []
    for one in keys:
        requester = _socket(context, zmq.DEALER, member.address, one)
        subscriber = _socket(context, zmq.SUB, member.relay.events, one)
        replayer = _socket(context, zmq.DEALER, member.relay.replay, one)
        for _ in range(20):
            await requester.send(encode_fleet_message(Hello(PROTOCOL, "intruder")))
            await replayer.send_multipart([b"", SNAPSHOT])
            await replayer.send_multipart([b"", POSITION])
        sockets += [requester, subscriber, replayer]
    num_gateways = 0 if member.server.service is None else member.server.service.num_gateways
    has_answer = [bool(await one.poll(SILENT_MS)) for one in sockets]
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" + bytes(8) + b"\x7f\x03", Random(1).randbytes(500)):
        for address in (member.address, member.relay.events, member.relay.replay):
            response = await asyncio.to_thread(plain_bytes, address, data)
            has_answer.append(b"oracle" in response)
    return sum(has_answer) + (num_gateways != 1)


async def _replay_handshake(member: SmallMember, right: GatewayKeys) -> int:
    """Replay a recorded handshake byte for byte on another connection."""
    async with (
        wire_to(member.address) as (wire, address),
        FleetModel("oracle", FixedMembers([address]), right) as client,
    ):
        await client.generate("overheard", SHORT)
        recorded = bytes(wire.overheard)
    service = member.server.service
    num_before = 0 if service is None else service.num_gateways
    host, _, port = member.address.removeprefix("tcp://").rpartition(":")

    def replay() -> bytes:
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(recorded)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while data := connection.recv(4096):
                    answer += data
            except (ConnectionError, TimeoutError):
                pass
            return answer

    answer = await asyncio.to_thread(replay)
    num_after = 0 if service is None else service.num_gateways
    return (num_after > num_before) + (b"oracle" in answer) + (not recorded)


async def _send_malformed(
    context: zmq.asyncio.Context, member: SmallMember, right: GatewayKeys, random: Random, count: int
) -> int:
    """Send malformed messages with the right keys, to the sockets for messages and replays."""
    requester = _socket(context, zmq.DEALER, member.address, right)
    replayer = _socket(context, zmq.DEALER, member.relay.replay, right)
    await requester.send(encode_fleet_message(Hello(PROTOCOL, "intruder")))
    for number in range(count):
        data = spoilt(random, encode_fleet_message(random.choice(TO_MEMBER[1:])))
        if number % 4:
            await requester.send(data)
        else:
            frames = random.choice(([b"", data], [b"", random.randbytes(8)], [data], [b"", b"", b"", data], [b"", b""]))
            await replayer.send_multipart(frames)
        if number % 100 == 99:
            await asyncio.sleep(0)
            while await requester.poll(0):
                await requester.recv_multipart()
            while await replayer.poll(0):
                await replayer.recv_multipart()
    num_malformed = -1
    while num_malformed != member.server.num_malformed:
        num_malformed = member.server.num_malformed
        await asyncio.sleep(0.5)
    return count


async def _add_foreign_member(right: GatewayKeys, keys: MemberKeys) -> int:
    """A member with another model under the same name must get no request."""
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
