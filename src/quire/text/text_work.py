"""The text work that a thread does: who pays for it, what it may still take, and whether its client has left.

A pool that works for tenants begins a `TextWork` for each piece and makes it current in the thread that does it. What
costs processor time (`GrammarChecker`, `ChatTemplate`, the tokenizer) asks the current one before and after. Without a
pool, as in a program that runs a model in its own process, the work is the caller's own: it has the bounds of one
request.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from time import monotonic, thread_time
from typing import TypeVar

from quire.core.work_budget import WorkAccount, WorkBudget, WorkCut, WorkKind, WorkSpent
from quire.errors import WorkBudgetError

T = TypeVar("T")


class ClientLeftError(Exception):
    """The client is gone: what is left of its work is not done."""


class TextBudget:
    """The budget of all text work of a server. Safe from several threads."""

    def __init__(self) -> None:
        self._budget = WorkBudget()
        self._lock = threading.Lock()

    def left_s(self, account: WorkAccount, kind: WorkKind) -> float:
        """How long the next piece may take."""
        with self._lock:
            return self._budget.left_s(account, kind, monotonic())

    def spend(self, account: WorkAccount, kind: WorkKind, seconds: float) -> WorkCut | None:
        """Charge a piece."""
        with self._lock:
            return self._budget.spend(account, kind, seconds, monotonic())

    def spent(self) -> WorkSpent:
        """For operators."""
        with self._lock:
            return self._budget.spent()


class TextWork:
    """One piece: what one request's words come to."""

    def __init__(self, tenant: str, budget: TextBudget) -> None:
        self.account = WorkAccount(tenant)
        self._budget = budget
        self._num_taken = 0
        self.is_left = False
        """Set from another thread when the client has gone."""

    def check_client(self) -> None:
        """Raise ClientLeftError if no one waits for it any more."""
        if self.is_left:
            raise ClientLeftError

    def left_s(self, kind: WorkKind) -> float:
        """How long the next piece of this kind may take. Raises ClientLeftError."""
        self.check_client()
        return self._budget.left_s(self.account, kind)

    def spend(self, kind: WorkKind, seconds: float) -> None:
        """Charge a piece. Raises WorkBudgetError if there must be no more of it, ClientLeftError."""
        cut = self._budget.spend(self.account, kind, seconds)
        self.check_client()
        if cut is not None:
            raise cut.error

    def charge(self, kind: WorkKind, seconds: float) -> None:
        """The same of a piece that was done and is worth keeping: the next one is refused."""
        self._budget.spend(self.account, kind, seconds)
        self.check_client()

    @contextmanager
    def timed(self, kind: WorkKind) -> Iterator[None]:
        """Charge what this thread does inside. Raises as `spend` when it is done."""
        self.check_client()
        started_s = thread_time()
        yield
        self.spend(kind, thread_time() - started_s)

    def take_service_tokens(self) -> int:
        """What the tenant is to be charged with the request that comes of this, beyond what was taken before."""
        taken, self._num_taken = self._num_taken, self.account.service_tokens
        return max(0, self._num_taken - taken)

    def refusal(self, kind: WorkKind) -> WorkBudgetError | None:
        """Why there can be no more of this kind, if nothing is left."""
        if self.left_s(kind) > 0.0:
            return None
        cut = self._budget.spend(self.account, kind, TINY_S)
        return None if cut is None else cut.error

    def run(self, work: Callable[[], T]) -> T:
        """Do it as the current one of this thread."""
        self.check_client()
        token = _CURRENT.set(self)
        try:
            return work()
        finally:
            _CURRENT.reset(token)


TINY_S = 1e-9
"""What is spent to learn which bound leaves nothing."""
_CURRENT: ContextVar[TextWork | None] = ContextVar("text_work", default=None)


def current_work() -> TextWork:
    """What this thread does; the caller's own where no pool began it."""
    return _CURRENT.get() or TextWork("", TextBudget())


def timed_work(kind: WorkKind) -> AbstractContextManager[None]:
    """Charge what this thread does inside to its current work. Raises as `TextWork.spend` when it is done."""
    return current_work().timed(kind)
