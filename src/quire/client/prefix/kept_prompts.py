"""Recent prompts as tokens, kept for comparison with later prompts. Pure.

A conversation has one entry: its next prompt replaces the previous one. Entries are bounded per scope (the prompts of
one tenant, cache group and model), per tenant, and in total, with least-recently-used eviction.
"""

from collections import OrderedDict
from dataclasses import dataclass

from quire.client.prefix.prompt_alignment import WIDTH, num_common

MAX_PROMPT_TOKENS = 1 << 16
"""Tokens after this position are not kept."""
MAX_PROMPTS = 16
"""Maximum prompts per scope."""
MAX_TENANT_BYTES = 2 << 20
MAX_BYTES = 32 << 20
PROMPT_BYTES = 512
"""Approximate memory of an entry without its tokens."""
MAX_NEAREST = 3
NEAR_TOKENS = 4
"""Prompts whose common prefix is at most this many tokens shorter than the longest count as equally near."""


@dataclass(frozen=True, slots=True)
class PromptScope:
    """The tenant, cache group and model within which prompts are compared."""

    tenant: str
    cache_group: str
    model: str


@dataclass(slots=True, eq=False)
class KeptPrompt:
    """The tokens of one prompt, and of its answer once it is known."""

    request_id: str
    tokens: bytes
    num_prompt_tokens: int

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the entry."""
        return len(self.tokens) + PROMPT_BYTES


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
        self.num_bytes = 0
        """Approximate memory of all entries."""

    def __len__(self) -> int:
        return len(self.by_request)

    def nearest(self, scope: PromptScope, tokens: bytes) -> list[tuple[KeptPrompt, int]]:
        """Return the prompts with the longest common prefix and its length in tokens, newest first."""
        tenant = self.tenants.get(scope.tenant)
        prompts = [] if tenant is None else tenant.scopes.get(scope, [])
        prefixes = [(prompt, num_common(tokens, prompt.tokens)) for prompt in reversed(prompts)]
        max_common = max((num_shared for _, num_shared in prefixes), default=0)
        return [pair for pair in prefixes if pair[1] >= max(1, max_common - NEAR_TOKENS)][:MAX_NEAREST]

    def add(self, scope: PromptScope, request_id: str, tokens: bytes, replaced: KeptPrompt | None = None) -> None:
        """Add a prompt, in place of `replaced`, the prompt that it continues."""
        self._drop(request_id)
        if replaced is not None:
            self._drop(replaced.request_id)
        tenant = self.tenants.setdefault(scope.tenant, _Tenant())
        self.tenants.move_to_end(scope.tenant)
        prompts = tenant.scopes.setdefault(scope, [])
        tenant.scopes.move_to_end(scope)
        prompt = KeptPrompt(request_id, tokens[: MAX_PROMPT_TOKENS * WIDTH], len(tokens) // WIDTH)
        prompts.append(prompt)
        self.by_request[request_id] = (scope, prompt)
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
        if not prompts:
            del tenant.scopes[scope]
        if not tenant.scopes:
            del self.tenants[scope.tenant]

    def _count(self, tenant: _Tenant, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        tenant.num_bytes += num_bytes
