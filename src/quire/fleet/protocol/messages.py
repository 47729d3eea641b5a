"""What crosses between a gateway and a member: msgspec structs as msgpack. Nothing that can carry code.

    gateway ──► Hello, then assignments, other commands and a heartbeat each second ──► member
    gateway ◄── Welcome · TextAssets · MemberStepped · MemberBeat · CallReply · Goodbye ◄── member

Token ids travel, never text and never tensors; durations, never instants. Bytes that are no message raise
`MessageError`, and nothing else.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from quire.core.events import RequestEvent
from quire.engine.calls import CallReply, EngineCall, WireMessage
from quire.engine.commands import Cancel, ClearCache, Restore, Submit
from quire.engine.engine import ModelInfo
from quire.errors import MessageError, QuireError
from quire.worker.messages import WorkerLoad

PROTOCOL = 3
MAX_MESSAGE_BYTES = 64 << 20
"""A prompt of a million tokens has 5 MB, the largest tokenizers have 40."""
MAX_STEP_BYTES = 16 << 20
"""Of what a member sends beside its text assets: log-probabilities of 16,000 prompt tokens have 5 MB."""
PART_EVENTS = 256
"""Of a step, before other tasks of the gateway's loop have a turn."""

NotNegative = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A count."""


# -- to the member -----------------------------------------------------------------------------------------------------


class Hello(WireMessage, frozen=True):
    """The first message of a gateway. A second one starts a new session."""

    protocol: int
    gateway: str
    """Its name in logs."""


class GatewayBeat(WireMessage, frozen=True):
    """The gateway is alive, and still needs its requests."""


class RequestTextAssets(WireMessage, frozen=True):
    """Send the text assets: a gateway has none of its own."""


class Assign(WireMessage, frozen=True):
    """A request, and how many tokens of its prompt the gateway expects to be computed."""

    command: Submit | Restore
    num_uncached_tokens: int


class GoodbyeAck(WireMessage, frozen=True):
    """The response to Goodbye: everything before it was received."""


ToMember = Hello | GatewayBeat | RequestTextAssets | GoodbyeAck | Assign | Cancel | EngineCall | ClearCache

# -- to the gateway ----------------------------------------------------------------------------------------------------


class MemberCard(msgspec.Struct, array_like=True, frozen=True):
    """A member's description of itself."""

    model: str
    """The operator's name of the model."""
    info: ModelInfo
    incarnation: str
    """A new one after each start: a gateway that has another one drops that one's blocks."""
    events: str = ""
    """Where it publishes KV events; empty: nowhere."""
    replay: str = ""
    """Where lost KV events can be requested."""
    has_size: bool = True
    """Whether the number of blocks is the server's own and not an estimate."""


class Welcome(WireMessage, frozen=True):
    """The response to Hello."""

    protocol: int
    card: MemberCard


class TextAssets(WireMessage, frozen=True):
    """What converts text to the model's tokens and back."""

    tokenizer_json: bytes
    chat_template: str | None
    eos_token_ids: tuple[int, ...]
    eos_texts: tuple[str, ...]
    special_tokens: dict[str, str]
    generation_defaults: dict[str, float | int]
    writes_tools: bool = False
    """Where the chat template has no tools, quire writes them into the prompt itself."""


class MemberReport(msgspec.Struct, array_like=True, frozen=True):
    """How busy a member is."""

    load: WorkerLoad
    num_uncomputed_tokens: NotNegative
    """Prompt tokens that are still to be computed there, of all gateways' requests."""
    num_received: NotNegative
    """Assignments received from this gateway: later ones are not counted here."""
    num_gateways: NotNegative = 1
    """Gateways connected to it, this one among them."""


class MemberStepped(WireMessage, frozen=True):
    """All events of one step for one gateway's requests: either all of them arrive or none."""

    events: tuple[RequestEvent, ...]
    report: MemberReport | None = None
    """None: about the same as the one before."""


class MemberBeat(WireMessage, frozen=True):
    """A heartbeat, sent each second and whenever the member's state changes."""

    state: str
    """Its supervisor's: only one that is `ready` takes new requests."""
    report: MemberReport


class Goodbye(WireMessage, frozen=True):
    """The last message of a member that has drained: it exits when this is acknowledged."""


ToGateway = Welcome | TextAssets | MemberStepped | MemberBeat | CallReply | Goodbye

encode_fleet_message = msgspec.msgpack.Encoder().encode
_to_member = msgspec.msgpack.Decoder(ToMember)
_to_gateway = msgspec.msgpack.Decoder(ToGateway)


def decode_to_member(data: bytes) -> ToMember:
    """A message of a gateway. Raises MessageError."""
    return _decode(_to_member, data)  # type: ignore[no-any-return]


def decode_to_gateway(data: bytes) -> ToGateway:
    """A message of a member. Raises MessageError."""
    return _decode(_to_gateway, data)  # type: ignore[no-any-return]


def bounded_parts(message: ToGateway) -> Iterator[ToGateway]:
    """The same as messages that each take less than a turn of the loop; the last has the report."""
    if not isinstance(message, MemberStepped):
        yield message
        return
    events = message.events
    *borders, last = range(0, max(1, len(events)), PART_EVENTS)
    for at in borders:
        yield MemberStepped(events[at : at + PART_EVENTS])
    yield MemberStepped(events[last:], message.report)


def _decode(decoder: "msgspec.msgpack.Decoder[Any]", data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, QuireError) as error:
        raise MessageError(f"malformed message between gateway and member ({len(data)} bytes): {error}") from error
