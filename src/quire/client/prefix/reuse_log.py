"""A log of recent prompts: how many tokens of each were found in the cache, and why not more.

Bounded by number, age and bytes. Times are arguments. Lost tokens of the last hour are also counted per minute and
reason, so that the totals are complete even if an hour has more requests than the log keeps.
"""

from collections import deque
from dataclasses import dataclass

from quire.client.prefix.explanation import Difference, Explanation
from quire.core.memory.block_table import max_hit_blocks
from quire.errors import InvariantError
from quire.text.chat.prompt_parts import SYSTEM_ROLES as SYSTEM_ROLES  # noqa: PLC0414 - re-exported for the API
from quire.text.chat.prompt_parts import PartKind as PartKind  # noqa: PLC0414
from quire.text.chat.prompt_parts import PromptPart as PromptPart  # noqa: PLC0414
from quire.text.chat.prompt_parts import PromptParts as PromptParts  # noqa: PLC0414

MAX_RECORDS = 10_000
MAX_AGE_S = 3600.0
MAX_BYTES = 16 << 20
RECORD_BYTES = 1024
"""Upper estimate of a record's memory without its texts."""
MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class ReuseRecord:
    """The cache lookup of one prompt when its request began to run."""

    request_id: str
    """Id of the HTTP request: the `x-request-id` of its response."""
    tenant: str
    cache_group: str
    model: str
    at_s: float
    explanation: Explanation
    part: PromptPart | None
    """Reason `diverged`: the prompt part with the difference; None if it cannot be determined."""
    num_lost_tokens: int
    """Prompt tokens that were computed, but would have been hits if all full blocks of the prompt had been cached."""
    num_cached_tokens: int = 0
    """Prompt tokens not computed: found in the cache, or in blocks of another request for which this request waited."""
    prompt_index: int = 0
    """Index of the prompt in a request with several."""
    answer_id: str = ""
    """The id in the response body, which `find` accepts too."""


@dataclass(frozen=True, slots=True)
class Miss:
    """The cost of cache misses with one reason."""

    reason: str
    num_tokens: int
    """Lost tokens, as in `ReuseRecord`."""
    num_requests: int
    """Number of records: one for each prompt of each request."""


class _Minute:
    """Lost tokens and requests of one minute, by model and reason."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens: dict[tuple[str, str], int] = {}
        self.requests: dict[tuple[str, str], int] = {}


class ReuseLog:
    """Cache lookups of recent requests. Used from one event loop."""

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

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def add(self, record: ReuseRecord) -> None:
        """Add a record and drop the oldest beyond the bounds. Must be called in order of time."""
        self._records.append(record)
        for name in _names(record):
            self._by_name.setdefault(name, []).append(record)
        self._num_bytes += record_size(record)
        self._count(record)
        self.forget_old(record.at_s)

    def find(self, request_id: str) -> tuple[ReuseRecord, ...]:
        """Return the records of a request or answer id, one per prompt, in order; empty if unknown or dropped."""
        return tuple(sorted(self._by_name.get(request_id, ()), key=lambda record: record.prompt_index))

    def misses(self, now_s: float, model: str | None = None) -> list[Miss]:
        """Return the cost of the last hour by reason, of one model or of all, by decreasing cost."""
        self.forget_old(now_s)
        tokens, requests = dict[str, int](), dict[str, int]()
        for minute in self._minutes:
            for (name, reason), num_tokens in minute.tokens.items():
                if model is None or name == model:
                    tokens[reason] = tokens.get(reason, 0) + num_tokens
                    requests[reason] = requests.get(reason, 0) + minute.requests[name, reason]
        misses = [Miss(reason, tokens[reason], requests[reason]) for reason in tokens]
        return sorted(misses, key=lambda miss: (-miss.num_tokens, -miss.num_requests, miss.reason))

    def forget_old(self, now_s: float) -> None:
        """Drop records and minutes beyond the bounds of number, bytes and age."""
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
            records = self._by_name[name]
            if records[0] is not record:
                raise InvariantError(f"expected the oldest record first in the records of request {record.request_id}")
            del records[0]
            if not records:
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
    """Return the approximate memory of a record in bytes."""
    texts = [record.request_id, record.tenant, record.cache_group, record.model, record.answer_id]
    if record.part is not None:
        texts.append(record.part.name or "")
    if record.explanation.difference is not None:
        texts += _texts(record.explanation.difference)
    return RECORD_BYTES + sum(4 * len(text) for text in texts)


def _texts(difference: Difference) -> list[str]:
    return [difference.token, difference.cached_token, difference.before, difference.after, difference.cached_after]


def lost_tokens(num_prompt_tokens: int, num_cached_tokens: int, block_size: int) -> int:
    """Return the number of tokens that were computed but could have been hits: all tokens in full blocks, except the
    prompt's last token, which is always computed, minus the cached tokens."""
    return max(0, max_hit_blocks(num_prompt_tokens, block_size) * block_size - num_cached_tokens)
