"""What an engine may be told, as tagged structs: the same in a thread's queue and on the wire to a worker."""

import msgspec

from quire.core.digests import Namespace
from quire.core.request import Request


class _Command(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag=True):
    """An array that begins with its own name."""


class Submit(_Command, frozen=True):
    """A new request: it may be refused."""

    request: Request


class Restore(_Command, frozen=True):
    """A request that an engine before this one had let in, with the tokens it had."""

    request: Request


class Cancel(_Command, frozen=True):
    """End a request, or one of its answers alone, if it lives."""

    request_id: str
    index: int | None = None
    """Which answer; None: all of them."""


class Explain(_Command, frozen=True):
    """Say how much of a prompt is cached, and why the next token is not. It is not run."""

    question_id: str
    namespace: Namespace
    prompt: tuple[int, ...]


class ClearCache(_Command, frozen=True):
    """Forget every cached block that nobody uses."""


class Close(_Command, frozen=True):
    """The last one: end after the step in flight."""


Command = Submit | Restore | Cancel | Explain | ClearCache | Close
