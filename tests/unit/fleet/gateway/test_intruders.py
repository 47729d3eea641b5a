"""Whoever has no right to speak, or says what is no message: nothing is taken in, nothing falls over, and the member
goes on serving those it knows."""

import asyncio
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from quire.client.request.params import SamplingParams
from quire.core.events import Queued
from quire.engine.engine import ModelIdentity, ModelInfo
from quire.errors import MessageError
from quire.fleet.protocol.keys import GatewayKeys, make_keys, read_gateway_keys, read_member_keys, secure_gateway
from quire.fleet.protocol.messages import (
    PROTOCOL,
    Goodbye,
    Hello,
    MemberBeat,
    MemberCard,
    MemberReport,
    MemberStepped,
    TextAssets,
    Welcome,
    decode_to_gateway,
    decode_to_member,
    encode_fleet_message,
)
from quire.worker.messages import WorkerLoad
from tests.support.fleet.small_fleets import SmallMember, small_fleet
from tests.support.workers.messages import EVENTS
from tests.support.workers.strange_messages import TO_MEMBER, plain_bytes, spoilt

INFO = ModelInfo(ModelIdentity("model", "layout"), 32, 100, 49152, 4096, "line", ("note",), "bits")
REPORT = MemberReport(WorkerLoad(1, 2, 3, 4, 5, 6, (7, 8)), 9, 10)
TO_GATEWAY: list[msgspec.Struct] = [
    Welcome(PROTOCOL, MemberCard("name", INFO, "life", "tcp://events", "tcp://replay")),
    TextAssets(b"{}", None, (1, 2), ("end",), {"bos": "<s>"}, {"top_k": 5, "top_p": 0.5}, True),
    MemberStepped(tuple(EVENTS), REPORT),
    MemberStepped((Queued("a", epoch=1),)),
    MemberBeat("ready", REPORT),
    Goodbye(),
]
NUM_SPOILT = 3000
SHORT = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("message", TO_MEMBER + TO_GATEWAY, ids=lambda one: type(one).__name__)
def test_what_is_said_is_what_is_heard(message: object) -> None:
    decode = decode_to_member if message in TO_MEMBER else decode_to_gateway
    assert decode(encode_fleet_message(message)) == message


@pytest.mark.parametrize(("messages", "decode"), [(TO_MEMBER, decode_to_member), (TO_GATEWAY, decode_to_gateway)])
def test_spoilt_messages_are_messages_or_message_errors_and_nothing_else(
    messages: list[object], decode: object
) -> None:
    random, num_refused = Random(7), 0
    for _ in range(NUM_SPOILT):
        data = spoilt(random, encode_fleet_message(random.choice(messages)))
        try:
            decode(data)  # type: ignore[operator]
        except MessageError:
            num_refused += 1
    assert num_refused > NUM_SPOILT / 2


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_message_errors_or_messages(data: bytes) -> None:
    for decode in (decode_to_member, decode_to_gateway):
        with suppress(MessageError):
            assert isinstance(decode(data), msgspec.Struct)


def test_numbers_that_are_none_are_no_reports() -> None:
    for number in (-1, 1 << 60):
        with pytest.raises(MessageError):
            decode_to_gateway(encode_fleet_message(MemberBeat("ready", MemberReport(WorkerLoad(), number, 0))))


def intruder(context: zmq.asyncio.Context, address: str, keys: GatewayKeys | None) -> zmq.asyncio.Socket:
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    secure_gateway(made, keys)
    made.connect(address)
    return made


def test_without_the_right_key_nobody_is_heard_and_the_right_gateway_is_served_meanwhile(tmp_path: Path) -> None:
    member_file, gateway_file = make_keys(tmp_path / "right")
    _, strange_file = make_keys(tmp_path / "strange")
    right, strange = read_gateway_keys(gateway_file), read_gateway_keys(strange_file)
    # Who knows the members' public key, which is no secret, and not the gateways' secret.
    unknown = GatewayKeys(strange.public, strange.secret, right.member)

    async def run() -> None:
        keys = read_member_keys(member_file)
        async with small_fleet(1, member_keys=keys, gateway_keys=right) as (model, members):
            context = zmq.asyncio.Context()
            sockets = [intruder(context, members[0].address, one) for one in (None, strange, unknown)]
            for _ in range(20):
                for made in sockets:
                    await made.send(encode_fleet_message(Hello(PROTOCOL, "intruder")))
            for data in (
                b"GET / HTTP/1.1\r\n\r\n",
                bytes(64),
                b"\xff" + bytes(8) + b"\x7f\x03",
                Random(1).randbytes(500),
            ):
                heard = await asyncio.to_thread(plain_bytes, members[0].address, data)
                assert b"oracle" not in heard
            assert len((await model.generate("once", SHORT)).answers[0].token_ids) == 5
            for made in sockets:
                assert not await made.poll(100)
            assert members[0].server.service is not None
            assert members[0].server.service.num_gateways == 1
            assert members[0].server.num_malformed == 0, "nothing of it came as far as that"
            context.destroy(linger=0)

    asyncio.run(run())


def test_a_member_goes_on_serving_while_hundreds_of_strange_messages_come_after_a_good_handshake() -> None:
    async def run() -> None:
        async with small_fleet(1) as (model, members):
            context = zmq.asyncio.Context()
            expected = (await model.generate("once", SHORT)).answers[0].token_ids
            random, sockets = Random(11), list[zmq.asyncio.Socket]()
            for hello in (True, False):
                made = intruder(context, members[0].address, None)
                if hello:
                    await made.send(encode_fleet_message(Hello(PROTOCOL, "intruder")))
                await made.send_multipart([b"two", b"parts"])
                await made.send(b"")
                for _ in range(300):
                    data = encode_fleet_message(random.choice(TO_MEMBER[1:]))
                    await made.send(spoilt(random, data) if hello else data)
                sockets.append(made)
            assert (await model.generate("once", SHORT)).answers[0].token_ids == expected
            await heard_all(members[0])
            assert members[0].server.num_malformed > 300
            assert members[0].supervisor.num_restarts == 0
            assert (await model.generate("twice", SHORT)).answers[0].token_ids
            assert members[0].supervisor.num_restarts == 0
            context.destroy(linger=0)

    asyncio.run(run())


async def heard_all(member: SmallMember) -> None:
    """Until its socket has nothing for it."""
    num_malformed = -1
    while num_malformed != member.server.num_malformed:
        num_malformed = member.server.num_malformed
        await asyncio.sleep(0.2)
