"""Detect prompt lines that repeatedly prevent cache hits, and estimate their cost. Pure: no clock, no sockets; called
for every prompt when its request begins to run.

    prompt ─► comparison with similar prompts of the tenant ─► gaps ─► instabilities ─► patterns ─► warnings

A single difference causes no warning, because conversations branch and prompts vary. A warning requires that the same
line differs repeatedly and that many equal tokens after the line had to be recomputed only for that reason. The loss is
the number of equal tokens after the line, at most the number of computed tokens.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from quire.client.prefix.explanation import UNKNOWN
from quire.client.prefix.kept_prompts import KeptPrompt, KeptPrompts, PromptName, PromptScope
from quire.client.prefix.prompt_alignment import WIDTH, Gap, gaps_between, packed
from quire.client.prefix.prompt_comparison import ComparedPrompt, PromptComparison, compare_prompts
from quire.client.prefix.reuse_log import PromptPart, PromptParts, ReuseRecord
from quire.client.prefix.unstable_lines import ComparedPrompts, Instability, Place, UnstableKind, instabilities

HOUR_S, MINUTE_S = 3600.0, 60.0
MIN_REQUESTS = 3
"""Minimum requests that lost tokens to a line before a warning."""
MIN_VALUES: Mapping[UnstableKind, int] = {"order": 2, "history": 1}
"""Minimum different texts of the line before a warning; 3 for kinds not listed."""
MIN_LOST_TOKENS = 256
"""Minimum lost tokens within an hour before a warning."""
MIN_COMPUTED = 32
"""Prompts with fewer computed tokens are not examined, because their loss is small."""
MAX_PATTERNS = 2048
MAX_TENANT_PATTERNS = 64
MAX_VALUES = 8
MAX_REQUESTS = 4096
"""Maximum requests whose patterns are kept for `warnings_of_request`."""
MAX_SHOWN_CHARS = 160
DESCRIPTIONS: Mapping[UnstableKind, str] = {
    "dates": "a line with another date",
    "times": "a line with another time",
    "ids": "a line with another id",
    "numbers": "a line with another number",
    "order": "a text with its parts in another order",
    "text": "a line with other words",
    "history": "a history that is written in another way",
}
UNRELATED_REASONS = frozenset({"evicted", "other_namespace", "state_missing", UNKNOWN})
"""Reasons for misses that are not caused by lines of a prompt."""


@dataclass(frozen=True, slots=True)
class NewPrompt:
    """A prompt whose request has begun to run."""

    record: ReuseRecord
    token_ids: Sequence[int]
    text_of: Callable[[Sequence[int]], str]
    """Decodes tokens of the prompt."""
    parts: PromptParts | None = None
    """The token ranges of messages and tools; None for a plain prompt."""
    effort: str = ""
    """The reasoning effort that the client requested."""
    compared_id: str | None = None
    """The answer id of an earlier prompt to compare with."""
    block_size: int = 1


@dataclass(frozen=True, slots=True)
class PrefixWarning:
    """A line whose changes prevent many cache hits of a tenant."""

    tenant: str
    model: str
    kind: UnstableKind
    line: str | None
    """The line in the latest prompt; None for a caller that may not read it."""
    num_lost_tokens: int
    """Tokens lost within the last hour."""
    num_requests: int
    """Requests within the last hour that lost tokens."""

    @property
    def description(self) -> str:
        """A description of the change, without the line's text."""
        return DESCRIPTIONS[self.kind]

    @property
    def sentence(self) -> str:
        """The warning as one sentence, for logs and clients."""
        line = self.description if self.line is None else f"{self.description}, {self.line!r},"
        return f"{line} cost {self.num_lost_tokens:,} tokens in the last hour, in {self.num_requests:,} requests"


class _Pattern:
    """One line of a tenant's prompts: its different texts (values), and its cost in each minute of the last hour."""

    def __init__(self, kind: UnstableKind) -> None:
        self.kind = kind
        self.line = ""
        self.values: set[bytes] = set()
        self.num_requests = 0
        self.minutes: deque[list[int]] = deque()
        """Entries of minute number, lost tokens and requests."""
        self.reported_s: float | None = None
        """Time of the last report."""
        self.is_counted = False
        """Whether `count` was called for the pattern, with its losses up to then."""

    def add(self, instability: Instability, now_s: float) -> None:
        """Add the loss of another request."""
        self.line = shown_line(instability.line)
        if len(self.values) < MAX_VALUES:
            self.values.add(instability.value)
        self.num_requests += 1
        minute = int(now_s // MINUTE_S)
        if not self.minutes or self.minutes[-1][0] != minute:
            self.minutes.append([minute, 0, 0])
        self.minutes[-1][1] += instability.num_lost_tokens
        self.minutes[-1][2] += 1
        self.forget(now_s)

    def forget(self, now_s: float) -> None:
        """Drop minutes older than an hour."""
        while self.minutes and (self.minutes[0][0] + 1) * MINUTE_S <= now_s - HOUR_S:
            self.minutes.popleft()

    @property
    def num_lost_tokens(self) -> int:
        return sum(tokens for _, tokens, _ in self.minutes)

    @property
    def is_certain(self) -> bool:
        """Whether the numbers of requests, values and lost tokens are high enough for a warning."""
        is_repeated = self.num_requests >= MIN_REQUESTS and len(self.values) >= MIN_VALUES.get(self.kind, 3)
        return is_repeated and self.num_lost_tokens >= MIN_LOST_TOKENS


@dataclass(frozen=True, slots=True)
class _PatternName:
    model: str
    kind: UnstableKind
    pattern: str


class PrefixGuard:
    """Examines all prompts of a server. Used from one event loop."""

    def __init__(
        self,
        warn: Callable[[PrefixWarning], None] = lambda _: None,
        count: Callable[[str, int], None] = lambda _model, _num: None,
    ) -> None:
        """`warn` is called at most once an hour per pattern; `count` is called with a model and its lost tokens."""
        self._warn = warn
        self._count = count
        self._prompts = KeptPrompts()
        self._patterns: OrderedDict[str, OrderedDict[_PatternName, _Pattern]] = OrderedDict()
        self._num_patterns = 0
        self._requests: OrderedDict[str, tuple[str, list[_PatternName]]] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Memory of the kept prompts."""
        return self._prompts.num_bytes

    def examine(self, prompt: NewPrompt) -> PromptComparison | None:
        """Examine a prompt whose request has begun to run, and compare it with the earlier prompt that its client
        named, if any. Must be called in order of time."""
        record, tokens = prompt.record, packed(prompt.token_ids)
        comparison = self._compare(prompt, tokens)
        scope = PromptScope(record.tenant, record.cache_group, record.model)
        nearest = self._prompts.nearest(scope, tokens)
        self._prompts.add(
            scope,
            _prompt_id(record),
            tokens,
            _continued_prompt(nearest, tokens),
            parts=prompt.parts,
            name=PromptName(record.answer_id, len(prompt.token_ids), prompt.effort) if record.answer_id else None,
        )
        instability_list = _instabilities(prompt, tokens, nearest)
        names = [self._add(record, instability) for instability in instability_list]
        if names:
            old_names = self._requests.pop(record.request_id, (record.tenant, []))[1]
            self._requests[record.request_id] = (record.tenant, old_names + names)
            if len(self._requests) > MAX_REQUESTS:
                self._requests.popitem(last=False)
        return comparison

    def _compare(self, prompt: NewPrompt, tokens: bytes) -> PromptComparison | None:
        if prompt.compared_id is None:
            return None
        named = self._prompts.find(prompt.record.tenant, prompt.compared_id)
        ours = ComparedPrompt(prompt.record, tokens, prompt.block_size, prompt.parts, prompt.effort)
        return compare_prompts(ours, named)

    def complete(self, record: ReuseRecord, token_ids: Sequence[int]) -> None:
        """Add a prompt's answer, so that a later prompt that continues it with a rewritten history is recognized."""
        self._prompts.add_answer(_prompt_id(record), packed(token_ids))

    def warnings_of_request(self, request_id: str, now_s: float) -> list[PrefixWarning]:
        """Return the warnings for one request's client."""
        tenant, names = self._requests.get(request_id, ("", []))
        patterns = self._patterns.get(tenant, OrderedDict())
        pairs = [(name, patterns[name]) for name in dict.fromkeys(names) if name in patterns]
        return [_warning(tenant, name, pattern, now_s) for name, pattern in pairs if pattern.is_certain]

    def warnings(self, now_s: float, *, tenant: str | None = None, includes_lines: bool = False) -> list[PrefixWarning]:
        """Return warnings by decreasing loss: of one tenant, with the lines; or of all tenants, with the lines only if
        `includes_lines`, which only the admin socket sets."""
        tenants = list(self._patterns) if tenant is None else [tenant]
        shows_lines = includes_lines or tenant is not None
        result = list[PrefixWarning]()
        for tenant_name in tenants:
            for name, pattern in self._patterns.get(tenant_name, OrderedDict()).items():
                pattern.forget(now_s)
                if pattern.is_certain:
                    result.append(_warning(tenant_name, name, pattern, now_s, is_read=shows_lines))
        return sorted(result, key=lambda warning: (-warning.num_lost_tokens, warning.tenant, warning.kind))

    def _add(self, record: ReuseRecord, instability: Instability) -> _PatternName:
        name = _PatternName(record.model, instability.kind, instability.pattern[:MAX_SHOWN_CHARS])
        patterns = self._patterns.setdefault(record.tenant, OrderedDict())
        self._patterns.move_to_end(record.tenant)
        pattern = patterns.get(name)
        if pattern is None:
            pattern = patterns[name] = _Pattern(instability.kind)
            self._num_patterns += 1
            self._make_room(patterns)
        patterns.move_to_end(name)
        pattern.add(instability, record.at_s)
        if pattern.is_certain:
            self._report(record, name, pattern, instability.num_lost_tokens)
        return name

    def _report(self, record: ReuseRecord, name: _PatternName, pattern: _Pattern, num_lost: int) -> None:
        self._count(record.model, num_lost if pattern.is_counted else pattern.num_lost_tokens)
        pattern.is_counted = True
        if pattern.reported_s is None or record.at_s - pattern.reported_s >= HOUR_S:
            pattern.reported_s = record.at_s
            self._warn(_warning(record.tenant, name, pattern, record.at_s))

    def _make_room(self, patterns: OrderedDict[_PatternName, _Pattern]) -> None:
        if len(patterns) > MAX_TENANT_PATTERNS:
            patterns.popitem(last=False)
            self._num_patterns -= 1
        while self._num_patterns > MAX_PATTERNS:
            tenant, oldest = next(iter(self._patterns.items()))
            oldest.popitem(last=False)
            self._num_patterns -= 1
            if not oldest:
                del self._patterns[tenant]


def _instabilities(prompt: NewPrompt, tokens: bytes, nearest: Sequence[tuple[KeptPrompt, int]]) -> list[Instability]:
    """Return the instabilities of a prompt, compared with the nearest prompt that has the most equal tokens."""
    reason, num_cached = prompt.record.explanation.reason, prompt.record.num_cached_tokens
    num_computed = len(tokens) // WIDTH - num_cached
    if reason in UNRELATED_REASONS or num_computed < MIN_COMPUTED:
        return []
    # A kept prompt that shares fewer tokens than were cached was not the source of the hit, so it is not compared.
    comparisons = [
        (gaps_between(tokens, theirs.tokens, start), theirs)
        for theirs, start in nearest
        if start >= num_cached and start * WIDTH < min(len(tokens), len(theirs.tokens))
    ]
    gaps, theirs = max(comparisons, key=lambda pair: _num_alike(pair[0]), default=((), None))
    if theirs is None or not _num_alike(gaps):
        return []  # no equal tokens after the difference: an unrelated prompt, so no text is decoded
    prompts = ComparedPrompts(tokens, theirs, gaps, prompt.text_of, partial(_place_of, prompt), partial(_range, prompt))
    return _limit_loss(instabilities(prompts), num_computed)


def _num_alike(gaps: Sequence[Gap]) -> int:
    return sum(gap.num_alike for gap in gaps)


def _limit_loss(instability_list: Sequence[Instability], num_computed: int) -> list[Instability]:
    """Limit the total loss of a request to the tokens that were computed."""
    limited, num_remaining = list[Instability](), num_computed
    for one in instability_list:
        num_lost = min(one.num_lost_tokens, num_remaining)
        num_remaining -= num_lost
        if num_lost:
            limited.append(Instability(one.kind, one.line, one.pattern, one.value, num_lost))
    return limited


def _continued_prompt(nearest: Sequence[tuple[KeptPrompt, int]], tokens: bytes) -> KeptPrompt | None:
    """Return the kept prompt that this prompt extends, if any."""
    return next((old for old, start in nearest if start >= min(old.num_prompt_tokens, len(old.tokens) // WIDTH)), None)


def _prompt_id(record: ReuseRecord) -> str:
    return f"{record.request_id}/{record.prompt_index}"


def _place_of(prompt: NewPrompt, gap: Gap) -> Place:
    """Return the place that contains a gap. A gap that begins or ends in a message counts as in a message."""
    parts = prompt.parts
    if parts is None:
        return "text"
    gap_parts = [parts.at(gap.start), parts.at(max(gap.start, gap.stop - 1))]
    places: list[Place] = ["message" if part is None else _part_place(part) for part in gap_parts]
    return "message" if "message" in places else next((place for place in places if place != "text"), "text")


def _range(prompt: NewPrompt, gap: Gap, size: int) -> tuple[int, int]:
    """Return the token range around a gap within the same prompt part, without the template's text."""
    min_start, max_stop = max(0, gap.start - size), min(len(prompt.token_ids), gap.stop + size)
    if prompt.parts is None:
        return min_start, max_stop
    start, part = gap.start, prompt.parts.at(gap.start)
    while start > min_start and prompt.parts.at(start - 1) == part:
        start -= 1
    stop, part = gap.stop, prompt.parts.at(gap.stop)
    while stop < max_stop and prompt.parts.at(stop) == part:
        stop += 1
    # `PromptParts.at` assigns the first token after a part to the part.
    return start, stop if stop == max_stop else max(gap.stop, stop - 1)


def _part_place(part: PromptPart) -> Place:
    match part.kind:
        case "message":
            return "system" if part.name in ("system", "developer") else "message"
        case "text":
            return "text"
        case kind:
            return kind


def _warning(
    tenant: str, name: _PatternName, pattern: _Pattern, now_s: float, *, is_read: bool = True
) -> PrefixWarning:
    pattern.forget(now_s)
    num_requests = sum(requests for _, _, requests in pattern.minutes)
    line = pattern.line if is_read else None
    return PrefixWarning(tenant, name.model, name.kind, line, pattern.num_lost_tokens, num_requests)


def shown_line(line: str) -> str:
    """Return a line without control characters, cut to MAX_SHOWN_CHARS."""
    clean = "".join(char if char.isprintable() else " " for char in line[: 2 * MAX_SHOWN_CHARS]).strip()
    return clean if len(clean) <= MAX_SHOWN_CHARS else clean[: MAX_SHOWN_CHARS - 1] + "…"
