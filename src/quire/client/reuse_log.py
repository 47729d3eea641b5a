"""How much of each prompt was found in the cache, and why no more was, of the requests of the last while.

Bounded three ways: by number, by age and by bytes. Time is handed in. What an hour cost by reason is counted by
minutes, so that it is whole also where more requests come in an hour than are kept.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from quire.client.explanation import Difference, Explanation
from quire.errors import InvariantError

MAX_RECORDS = 10_000
MAX_AGE_S = 3600.0
MAX_BYTES = 16 << 20
RECORD_BYTES = 1024
"""What a record takes beside its texts, generously."""
MINUTE_S = 60.0

PartKind = Literal["system", "tool", "message", "text"]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A piece of a prompt as its client gave it."""

    kind: PartKind
    """`text`: a prompt that is no conversation, or what the model's template wrote itself."""
    index: int
    """Which one of the client's messages or tools, or of its prompts, from 0."""
    name: str | None = None
    """A tool's name, or the role of a message."""


@dataclass(frozen=True, slots=True)
class ReuseRecord:
    """What one prompt found in the cache at the moment its request began to run."""

    request_id: str
    """Of the HTTP request: what its answer's `x-request-id` says."""
    tenant: str
    cache_group: str
    model: str
    at_s: float
    explanation: Explanation
    part: PromptPart | None
    """diverged: in which part of the prompt; None where that cannot be known."""
    num_lost_tokens: int
    """Prompt tokens that were computed and would have been found, had all of the prompt's blocks been cached."""
    prompt_index: int = 0
    """Which one of the request's prompts."""


@dataclass(frozen=True, slots=True)
class Miss:
    """What one reason cost."""

    reason: str
    num_tokens: int
    """Lost: see `ReuseRecord`."""
    num_requests: int
    """Prompts, where a request has several."""


OnRecord = Callable[[ReuseRecord], None]


class _Minute:
    """What was lost within one minute, by model and reason."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens: dict[tuple[str, str], int] = {}
        self.requests: dict[tuple[str, str], int] = {}


class ReuseLog:
    """The reuse of the requests of the last while. For one event loop."""

    def __init__(
        self, max_records: int = MAX_RECORDS, max_age_s: float = MAX_AGE_S, max_bytes: int = MAX_BYTES
    ) -> None:
        self._max_records = max_records
        self._max_age_s = max_age_s
        self._max_bytes = max_bytes
        self._records: deque[ReuseRecord] = deque()
        self._by_request: dict[str, list[ReuseRecord]] = {}
        self._num_bytes = 0
        self._minutes: deque[_Minute] = deque()
        self._callbacks: list[OnRecord] = []

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """What is kept takes about so much."""
        return self._num_bytes

    def add(self, record: ReuseRecord) -> None:
        """Remember it, forget what that leaves no room for, and tell whoever listens. Records come in order of time."""
        self._records.append(record)
        self._by_request.setdefault(record.request_id, []).append(record)
        self._num_bytes += size_of(record)
        self._count(record)
        self.forget_old(record.at_s)
        for callback in tuple(self._callbacks):
            callback(record)

    def find(self, request_id: str) -> tuple[ReuseRecord, ...]:
        """Of this request, one for each prompt in order; none: it is not known, or no longer."""
        return tuple(sorted(self._by_request.get(request_id, ()), key=lambda record: record.prompt_index))

    def subscribe(self, callback: OnRecord) -> Callable[[], None]:
        """Tell each record from now on, on the thread that adds it. Returns what ends that."""
        self._callbacks.append(callback)

        def unsubscribe() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return unsubscribe

    def misses(self, now_s: float, model: str | None = None) -> list[Miss]:
        """What the last hour cost by reason, of one model or of all; the most expensive first."""
        self.forget_old(now_s)
        tokens, requests = dict[str, int](), dict[str, int]()
        for minute in self._minutes:
            for (name, reason), num_tokens in minute.tokens.items():
                if model is None or name == model:
                    tokens[reason] = tokens.get(reason, 0) + num_tokens
                    requests[reason] = requests.get(reason, 0) + minute.requests[name, reason]
        found = [Miss(reason, tokens[reason], requests[reason]) for reason in tokens]
        return sorted(found, key=lambda miss: (-miss.num_tokens, -miss.num_requests, miss.reason))

    def forget_old(self, now_s: float) -> None:
        """Drop what is too old, too many or too large."""
        while self._records and (
            len(self._records) > self._max_records
            or self._num_bytes > self._max_bytes
            or self._records[0].at_s < now_s - self._max_age_s
        ):
            self._drop_oldest()
        while self._minutes and (self._minutes[0].number + 1) * MINUTE_S <= now_s - self._max_age_s:
            self._minutes.popleft()

    def _drop_oldest(self) -> None:
        record = self._records.popleft()
        self._num_bytes -= size_of(record)
        its_records = self._by_request[record.request_id]
        if its_records[0] is not record:
            raise InvariantError(f"the oldest record of request {record.request_id} is not its first")
        del its_records[0]
        if not its_records:
            del self._by_request[record.request_id]

    def _count(self, record: ReuseRecord) -> None:
        number = int(record.at_s // MINUTE_S)
        if not self._minutes or self._minutes[-1].number < number:
            self._minutes.append(_Minute(number))
        minute, key = self._minutes[-1], (record.model, record.explanation.reason)
        minute.tokens[key] = minute.tokens.get(key, 0) + record.num_lost_tokens
        minute.requests[key] = minute.requests.get(key, 0) + 1


def size_of(record: ReuseRecord) -> int:
    """About how many bytes a record takes."""
    texts = [record.request_id, record.tenant, record.cache_group, record.model]
    if record.part is not None:
        texts.append(record.part.name or "")
    if record.explanation.difference is not None:
        texts += _texts(record.explanation.difference)
    return RECORD_BYTES + sum(4 * len(text) for text in texts)


def _texts(found: Difference) -> list[str]:
    return [found.token, found.cached_token, found.before, found.after, found.cached_after]
