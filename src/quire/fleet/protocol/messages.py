"""What crosses between a gateway and a member: msgspec structs as msgpack. Nothing that can carry code.

    gateway ──► Hello, then assignments, other commands and a sign of life each second ──► member
    gateway ◄── Welcome · ModelWords · MemberStepped · MemberBeat · Farewell ◄── member

Token ids travel, never text and never tensors; durations, never instants. Bytes that are no message raise
`MessageError`, and nothing else.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from quire.core.events import RequestEvent
from quire.engine.commands import Cancel, ClearCache, Explain, Restore, Submit
from quire.engine.engine import ModelInfo
from quire.errors import MessageError, QuireError
from quire.worker.messages import WorkerLoad

PROTOCOL = 1
MAX_MESSAGE_BYTES = 64 << 20
"""A prompt of a million tokens has 5 MB, the largest tokenizers have 40."""
MAX_STEP_BYTES = 16 << 20
"""Of what a member sends beside its words: log-probabilities of a step of 16,000 prompt tokens have 5 MB."""
PART_EVENTS = 256
"""Of a step, before others on the gateway's loop have a turn."""

NotNegative = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""What is counted."""


class _Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=True):
    """An array that begins with its own name."""


# -- to the member -----------------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """The first message of a gateway. Whoever said another one before begins anew with it."""

    protocol: int
    gateway: str
    """Its name in logs."""


class GatewayBeat(_Message, frozen=True):
    """The gateway is alive, and still wants what it asked for."""


class AskWords(_Message, frozen=True):
    """Send the model's words: a gateway has none of its own."""


class Assign(_Message, frozen=True):
    """A request, and how many tokens of its prompt the gateway believes are to be computed."""

    command: Submit | Restore
    num_uncached_tokens: int


class FarewellHeard(_Message, frozen=True):
    """The answer to Farewell: everything before it was heard."""


ToMember = Hello | GatewayBeat | AskWords | FarewellHeard | Assign | Cancel | Explain | ClearCache

# -- to the gateway ----------------------------------------------------------------------------------------------------


class MemberCard(msgspec.Struct, array_like=True, frozen=True):
    """What a member says of itself."""

    model: str
    """What its operator calls the model."""
    info: ModelInfo
    incarnation: str
    """Another one after each start: whoever knew the one before has to forget its blocks."""
    events: str = ""
    """Where it announces what it holds; empty: nowhere."""
    replay: str = ""
    """Where announcements that were lost can be asked for."""
    has_size: bool = True
    """Its number of blocks is its own word, and no guess."""


class Welcome(_Message, frozen=True):
    """The answer to Hello."""

    protocol: int
    card: MemberCard


class ModelWords(_Message, frozen=True):
    """What turns texts into the model's tokens and back."""

    tokenizer_json: bytes
    chat_template: str | None
    eos_token_ids: tuple[int, ...]
    eos_texts: tuple[str, ...]
    special_tokens: dict[str, str]
    generation_defaults: dict[str, float | int]
    writes_tools: bool = False
    """Where its template knows no tools, they are told of in words of ours."""


class MemberReport(msgspec.Struct, array_like=True, frozen=True):
    """How busy a member is."""

    load: WorkerLoad
    num_uncomputed_tokens: NotNegative
    """Prompt tokens that are still to be computed there, of all gateways' requests."""
    num_heard: NotNegative
    """Assignments that it has heard of this gateway: what came after them is not counted here."""
    num_gateways: NotNegative = 1
    """That it hears, this one among them."""


class MemberStepped(_Message, frozen=True):
    """All that one step brought to one gateway's requests: either all of it arrives or nothing."""

    events: tuple[RequestEvent, ...]
    report: MemberReport | None = None
    """None: about as it was told last."""


class MemberBeat(_Message, frozen=True):
    """The member is alive, told each second and whenever its state changes."""

    state: str
    """Its supervisor's: only one that is `ready` takes new requests."""
    report: MemberReport


class Farewell(_Message, frozen=True):
    """The last message of a member that was told to end and has done what it had: it goes when this was heard."""


ToGateway = Welcome | ModelWords | MemberStepped | MemberBeat | Farewell

encode_fleet_message = msgspec.msgpack.Encoder().encode
_to_member = msgspec.msgpack.Decoder(ToMember)
_to_gateway = msgspec.msgpack.Decoder(ToGateway)


def decode_to_member(data: bytes) -> ToMember:
    """What a gateway says. Raises MessageError."""
    return _decode(_to_member, data)  # type: ignore[no-any-return]


def decode_to_gateway(data: bytes) -> ToGateway:
    """What a member says. Raises MessageError."""
    return _decode(_to_gateway, data)  # type: ignore[no-any-return]


def bounded_parts(message: ToGateway) -> Iterator[ToGateway]:
    """The same as messages that are each heard within a turn of the loop; the last brings the report."""
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
        raise MessageError(f"{len(data)} bytes between gateway and member are no message: {error}") from error
