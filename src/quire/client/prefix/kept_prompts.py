"""Recent prompts as tokens, kept for comparison with later prompts. Pure.

A conversation has one entry: its next prompt replaces the previous one, which is a prefix of it, so the entry is found
by the ids of all answers of the conversation. Entries are bounded per scope (the prompts of one tenant, cache group and
model), per tenant, and in total, with least-recently-used eviction.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from quire.client.prefix.prompt_alignment import WIDTH, num_common
from quire.text.chat.prompt_parts import PromptParts

MAX_PROMPT_TOKENS = 1 << 16
"""Tokens after this position are not kept."""
MAX_PROMPTS, MAX_COMPARED = 64, 16
"""Maximum prompts per scope, and how many of the newest are compared with a new prompt to find the nearest."""
MAX_TENANT_BYTES = 2 << 20
MAX_BYTES = 32 << 20
MAX_NAMES = 64
"""Maximum answer ids per entry; the oldest are forgotten first."""
PROMPT_BYTES = 512
"""Approximate memory of an entry without its tokens, parts and names."""
SPAN_BYTES, NAME_BYTES = 192, 256
MAX_NEAREST = 3
NEAR_TOKENS = 4
"""Prompts whose common prefix is at most this many tokens shorter than the longest count as equally near."""


@dataclass(frozen=True, slots=True)
class PromptScope:
    """The tenant, cache group and model within which prompts are compared."""

    tenant: str
    cache_group: str
    model: str


@dataclass(frozen=True, slots=True)
class PromptName:
    """The id of an answer, by which its client refers to the prompt, and what is kept of the prompt for that id."""

    answer_id: str
    num_tokens: int
    """Length of the prompt; the entry may be longer, because it continues the prompt."""
    effort: str = ""
    """The reasoning effort, which a template may write into the prompt."""


@dataclass(slots=True, eq=False)
class KeptPrompt:
    """The tokens of one prompt, and of its answer once it is known."""

    request_id: str
    tokens: bytes
    num_prompt_tokens: int
    parts: PromptParts | None = None
    names: list[PromptName] = field(default_factory=list)
    """The answers to this prompt and to those that it continues, oldest first."""

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the entry."""
        num_spans = 0 if self.parts is None else len(self.parts)
        return len(self.tokens) + PROMPT_BYTES + SPAN_BYTES * num_spans + NAME_BYTES * len(self.names)


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A kept prompt, found by the id of its answer."""

    scope: PromptScope
    prompt: KeptPrompt
    name: PromptName


class _Tenant:
    """The scopes of one tenant, least recently used first."""

    def __init__(self) -> None:
        self.scopes: OrderedDict[PromptScope, list[KeptPrompt]] = OrderedDict()
        self.num_bytes = 0


class KeptPrompts:
    """Prompts by scope, oldest first within a scope."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_tenant_bytes: int = MAX_TENANT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self.tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self.by_request: dict[str, tuple[PromptScope, KeptPrompt]] = {}
        self.by_answer: dict[str, NamedPrompt] = {}
        self.num_bytes = 0
        """Approximate memory of all entries."""

    def __len__(self) -> int:
        return len(self.by_request)

    def nearest(self, scope: PromptScope, tokens: bytes) -> list[tuple[KeptPrompt, int]]:
        """Return the prompts with the longest common prefix and its length in tokens, newest first."""
        tenant = self.tenants.get(scope.tenant)
        prompts = [] if tenant is None else tenant.scopes.get(scope, [])
        prefixes = [(prompt, num_common(tokens, prompt.tokens)) for prompt in reversed(prompts[-MAX_COMPARED:])]
        max_common = max((num_shared for _, num_shared in prefixes), default=0)
        return [pair for pair in prefixes if pair[1] >= max(1, max_common - NEAR_TOKENS)][:MAX_NEAREST]

    def find(self, tenant: str, answer_id: str) -> NamedPrompt | None:
        """Return a tenant's prompt by the id of its answer."""
        named = self.by_answer.get(answer_id)
        return named if named is not None and named.scope.tenant == tenant else None

    def add(
        self,
        scope: PromptScope,
        request_id: str,
        tokens: bytes,
        replaced: KeptPrompt | None = None,
        *,
        parts: PromptParts | None = None,
        name: PromptName | None = None,
    ) -> None:
        """Add a prompt, in place of `replaced`, the prompt that it continues."""
        self._drop(request_id)
        names = [] if name is None else [name]
        if replaced is not None:
            names = [*replaced.names, *names][-MAX_NAMES:]
            self._drop(replaced.request_id)
        tenant = self.tenants.setdefault(scope.tenant, _Tenant())
        self.tenants.move_to_end(scope.tenant)
        prompts = tenant.scopes.setdefault(scope, [])
        tenant.scopes.move_to_end(scope)
        prompt = KeptPrompt(request_id, tokens[: MAX_PROMPT_TOKENS * WIDTH], len(tokens) // WIDTH, parts, names)
        prompts.append(prompt)
        self.by_request[request_id] = (scope, prompt)
        self.by_answer |= {one.answer_id: NamedPrompt(scope, prompt, one) for one in names}
        self._count(tenant, prompt.num_bytes)
        if len(prompts) > MAX_PROMPTS:
            self._drop(prompts[0].request_id)
        self._make_room(tenant)

    def add_answer(self, request_id: str, tokens: bytes) -> None:
        """Append the answer's tokens to the prompt of a request, if the prompt is still kept."""
        scope, prompt = self.by_request.get(request_id, (None, None))
        if scope is None or prompt is None or prompt.num_prompt_tokens > MAX_PROMPT_TOKENS:
            return
        old_bytes, tenant = prompt.num_bytes, self.tenants[scope.tenant]
        prompt.tokens = (prompt.tokens + tokens)[: MAX_PROMPT_TOKENS * WIDTH]
        self._count(tenant, prompt.num_bytes - old_bytes)
        self._make_room(tenant)

    def _make_room(self, tenant: _Tenant) -> None:
        while tenant.num_bytes > self._max_tenant_bytes:
            self._drop_oldest(tenant)
        while self.num_bytes > self._max_bytes:
            self._drop_oldest(next(iter(self.tenants.values())))

    def _drop_oldest(self, tenant: _Tenant) -> None:
        self._drop(next(iter(tenant.scopes.values()))[0].request_id)

    def _drop(self, request_id: str) -> None:
        scope, prompt = self.by_request.pop(request_id, (None, None))
        if scope is None or prompt is None:
            return
        tenant = self.tenants[scope.tenant]
        prompts = tenant.scopes[scope]
        prompts.remove(prompt)
        self._count(tenant, -prompt.num_bytes)
        for name in prompt.names:
            named = self.by_answer.get(name.answer_id)
            if named is not None and named.prompt is prompt:
                del self.by_answer[name.answer_id]
        if not prompts:
            del tenant.scopes[scope]
        if not tenant.scopes:
            del self.tenants[scope.tenant]

    def _count(self, tenant: _Tenant, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        tenant.num_bytes += num_bytes
