"""How much of each prompt was found in the cache, and why no more was, of the requests of the last while.

Bounded three ways: by number, by age and by bytes. Time is handed in. What an hour cost by reason is counted by
minutes, so that it is whole also where more requests come in an hour than are kept.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quire.client.prefix.explanation import Difference, Explanation
from quire.core.memory.block_table import hit_cap
from quire.errors import InvariantError
from quire.text.chat.prompt_parts import PromptPart as PromptPart  # noqa: PLC0414 - for the API, too
from quire.text.chat.prompt_parts import PromptParts as PromptParts  # noqa: PLC0414

MAX_RECORDS = 10_000
MAX_AGE_S = 3600.0
MAX_BYTES = 16 << 20
RECORD_BYTES = 1024
"""What a record takes beside its texts, generously."""
MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class ReuseRecord:
    """What one prompt found in the cache at the moment its request began to run."""

    request_id: str
    """Of the HTTP request: the `x-request-id` of its response."""
    tenant: str
    cache_group: str
    model: str
    at_s: float
    explanation: Explanation
    part: PromptPart | None
    """diverged: in which part of the prompt; None where that cannot be determined."""
    num_lost_tokens: int
    """Prompt tokens that were computed and would have been found, had all of the prompt's blocks been cached."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed: those found at that moment, and those of blocks that it waited for."""
    prompt_index: int = 0
    """Which one of the request's prompts."""
    answer_id: str = ""
    """The id in the response body; finds the record as well."""


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
        self._by_name: dict[str, list[ReuseRecord]] = {}
        self._num_bytes = 0
        self._minutes: deque[_Minute] = deque()
        self._callbacks: list[OnRecord] = []

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def add(self, record: ReuseRecord) -> None:
        """Keep it, drop what that leaves no room for, and call the subscribers. Records come in order of time."""
        self._records.append(record)
        for name in _names(record):
            self._by_name.setdefault(name, []).append(record)
        self._num_bytes += record_size(record)
        self._count(record)
        self.forget_old(record.at_s)
        for callback in tuple(self._callbacks):
            callback(record)

    def find(self, request_id: str) -> tuple[ReuseRecord, ...]:
        """Of this request or answer, one for each prompt in order; none: there is no such record, or it was dropped."""
        return tuple(sorted(self._by_name.get(request_id, ()), key=lambda record: record.prompt_index))

    def subscribe(self, callback: OnRecord) -> Callable[[], None]:
        """Call with each record from now on, on the thread that adds it. Returns what ends that."""
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
        self._num_bytes -= record_size(record)
        for name in _names(record):
            its_records = self._by_name[name]
            if its_records[0] is not record:
                raise InvariantError(f"the oldest record of request {record.request_id} is not its first")
            del its_records[0]
            if not its_records:
                del self._by_name[name]

    def _count(self, record: ReuseRecord) -> None:
        number = int(record.at_s // MINUTE_S)
        if not self._minutes or self._minutes[-1].number < number:
            self._minutes.append(_Minute(number))
        minute, key = self._minutes[-1], (record.model, record.explanation.reason)
        minute.tokens[key] = minute.tokens.get(key, 0) + record.num_lost_tokens
        minute.requests[key] = minute.requests.get(key, 0) + 1


def _names(record: ReuseRecord) -> tuple[str, ...]:
    return (record.request_id, record.answer_id) if record.answer_id else (record.request_id,)


def record_size(record: ReuseRecord) -> int:
    """About how many bytes a record takes."""
    texts = [record.request_id, record.tenant, record.cache_group, record.model, record.answer_id]
    if record.part is not None:
        texts.append(record.part.name or "")
    if record.explanation.difference is not None:
        texts += _texts(record.explanation.difference)
    return RECORD_BYTES + sum(4 * len(text) for text in texts)


def _texts(found: Difference) -> list[str]:
    return [found.token, found.cached_token, found.before, found.after, found.cached_after]


def lost_tokens(num_prompt_tokens: int, num_cached_tokens: int, block_size: int) -> int:
    """What of a prompt had to be computed that could have been found: its whole blocks, but for the last token, which
    is always computed; less what was found."""
    return max(0, hit_cap(num_prompt_tokens, block_size) * block_size - num_cached_tokens)
