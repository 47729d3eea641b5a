"""Messages between gateways and members: msgspec structs as msgpack, which cannot carry executable code.

    gateway ──► Hello, then assignments, other commands and a heartbeat each second ──► member
    gateway ◄── Welcome · TextAssets · MemberStepped · MemberBeat · CallReply · Goodbye ◄── member

Messages carry token ids, never text or tensors, and durations, never timestamps. Malformed bytes raise `MessageError`
and no other exception.
"""

from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec

from quire.core.events import RequestEvent
from quire.engine.calls import CallReply, EngineCall, WireMessage, wire_decoder
from quire.engine.commands import Cancel, ClearCache, Restore, Submit
from quire.engine.engine import ModelInfo
from quire.worker.messages import WorkerLoad

PROTOCOL = 4
MAX_MESSAGE_BYTES = 64 << 20
"""Maximum message size: a prompt of a million tokens takes 5 MB, the largest tokenizer 40 MB."""
MAX_STEP_BYTES = 16 << 20
"""Maximum size of a member's message except TextAssets: log-probabilities of 16,000 prompt tokens take 5 MB."""
PART_EVENTS = 256
"""Number of events of a step that the gateway handles before other tasks of its event loop run."""

NotNegative = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A count up to 2**53."""


# -- to the member -----------------------------------------------------------------------------------------------------


class Hello(WireMessage, frozen=True):
    """The first message of a gateway. A second one starts a new session."""

    protocol: int
    gateway: str
    """The gateway's name in logs."""


class GatewayBeat(WireMessage, frozen=True):
    """A heartbeat: the gateway is alive and still needs its requests."""


class RequestTextAssets(WireMessage, frozen=True):
    """A request for the model's text assets."""


class Assign(WireMessage, frozen=True):
    """A request, and the number of its tokens that the gateway expects the member to compute."""

    command: Submit | Restore
    num_uncached_tokens: int


class GoodbyeAck(WireMessage, frozen=True):
    """The response to Goodbye: the gateway has received all messages of the member."""


ToMember = Hello | GatewayBeat | RequestTextAssets | GoodbyeAck | Assign | Cancel | EngineCall | ClearCache

# -- to the gateway ----------------------------------------------------------------------------------------------------


class MemberCard(msgspec.Struct, array_like=True, frozen=True):
    """A member's description of itself."""

    model: str
    """The operator's name for the model."""
    info: ModelInfo
    incarnation: str
    """An id of this run of the member process; its cache is empty at the start."""
    events: str = ""
    """Endpoint of the member's KV events; empty if it publishes none."""
    replay: str = ""
    """Endpoint for requests for missed KV events."""
    has_size: bool = True
    """Whether the member reported its number of blocks; otherwise `info.num_blocks` is an estimate."""


class Welcome(WireMessage, frozen=True):
    """The response to Hello."""

    protocol: int
    card: MemberCard


class TextAssets(WireMessage, frozen=True):
    """The tokenizer, chat template and related settings of a model."""

    tokenizer_json: bytes
    chat_template: str | None
    eos_token_ids: tuple[int, ...]
    eos_texts: tuple[str, ...]
    special_tokens: dict[str, str]
    generation_defaults: dict[str, float | int]
    writes_tools: bool = False
    """Whether quire writes tool definitions into the prompt if the chat template does not support tools."""


class MemberReport(msgspec.Struct, array_like=True, frozen=True):
    """A member's load."""

    load: WorkerLoad
    num_uncomputed_tokens: NotNegative
    """Prompt tokens still to be computed, over the requests of all gateways."""
    num_received: NotNegative
    """Assignments received from this gateway; later assignments are not part of the reported load."""
    num_gateways: NotNegative = 1
    """Gateways connected to the member, including the receiver of this report."""


class MemberStepped(WireMessage, frozen=True):
    """All events of one step for one gateway's requests. Either all of them arrive or none."""

    events: tuple[RequestEvent, ...]
    report: MemberReport | None = None
    """None if the load has hardly changed since the previous report."""


class MemberBeat(WireMessage, frozen=True):
    """A heartbeat, sent each second and whenever the member's state changes."""

    state: str
    """State of the supervisor; only a `ready` member takes new requests."""
    report: MemberReport


class Goodbye(WireMessage, frozen=True):
    """The last message of a drained member, which exits when gateways have acknowledged it."""


ToGateway = Welcome | TextAssets | MemberStepped | MemberBeat | CallReply | Goodbye

encode_fleet_message = msgspec.msgpack.Encoder().encode
_DESCRIPTION = "message between gateway and member"
decode_to_member: Callable[[bytes], ToMember] = wire_decoder(ToMember, _DESCRIPTION)
"""Decodes a message from a gateway. Raises MessageError."""
decode_to_gateway: Callable[[bytes], ToGateway] = wire_decoder(ToGateway, _DESCRIPTION)
"""Decodes a message from a member. Raises MessageError."""


def bounded_parts(message: ToGateway) -> Iterator[ToGateway]:
    """Split a MemberStepped into messages of at most `PART_EVENTS` events; the last one has the report."""
    if not isinstance(message, MemberStepped):
        yield message
        return
    events = message.events
    *starts, last_start = range(0, max(1, len(events)), PART_EVENTS)
    for start in starts:
        yield MemberStepped(events[start : start + PART_EVENTS])
    yield MemberStepped(events[last_start:], message.report)
