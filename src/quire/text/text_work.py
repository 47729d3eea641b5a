"""CPU accounting of text work: which tenant is charged, how much budget is left, and whether the client disconnected.

A thread pool that serves tenants runs each piece of work through `run_charged`, in one of its threads. Code that costs
CPU time (`GrammarChecker`, `ChatTemplate`, the tokenizer) calls the functions below before and after the work. Without
a pool, for example when a program runs a model in its own process, each piece has the budget of one request.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic, thread_time
from typing import TypeVar

from quire.core.work_budget import MAX_TENANTS, WorkAccount, WorkBudget, WorkCut, WorkKind, WorkSpent
from quire.errors import WorkBudgetError

T = TypeVar("T")
PROBE_S = 1e-9
"""Time that is charged to an exhausted budget, so that `spend` returns the error of the exhausted limit."""


class ClientLeftError(Exception):
    """The client has disconnected, so the rest of its work is skipped."""


class TextBudget(WorkBudget):
    """The budget for all text work of a server. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def left_s(self, account: WorkAccount, kind: WorkKind, now_s: float, num_units: int = 1) -> float:
        with self._lock:
            return super().left_s(account, kind, now_s, num_units)

    def spend(
        self, account: WorkAccount, kind: WorkKind, seconds: float, now_s: float, num_units: int = 1
    ) -> WorkCut | None:
        with self._lock:
            return super().spend(account, kind, seconds, now_s, num_units)

    def spent(self, most: int = MAX_TENANTS) -> WorkSpent:
        with self._lock:
            return super().spent(most)


def _no_client() -> bool:
    return False


@dataclass(slots=True)
class _Payer:
    """The account and budget that are charged for a thread's current piece of work."""

    account: WorkAccount = field(default_factory=lambda: WorkAccount(""))
    budget: TextBudget = field(default_factory=TextBudget)
    has_client_left: Callable[[], bool] = _no_client
    num_charged_tokens: int = 0

    def spend(self, kind: WorkKind, seconds: float) -> WorkCut | None:
        return self.budget.spend(self.account, kind, seconds, monotonic())


_PAYER: ContextVar[_Payer | None] = ContextVar("text_work", default=None)


def run_charged(tenant: str, budget: TextBudget, has_client_left: Callable[[], bool], work: Callable[[], T]) -> T:
    """Run a piece of work in this thread, and charge all of its CPU time to one request of this tenant."""
    token = _PAYER.set(_Payer(WorkAccount(tenant), budget, has_client_left))
    try:
        _connected_payer()
        return work()
    finally:
        _PAYER.reset(token)


def _payer() -> _Payer:
    """The payer of this thread's work; a new one if no thread pool started the work."""
    return _PAYER.get() or _Payer()


def _connected_payer() -> _Payer:
    """The payer of this thread's work. Raises ClientLeftError if its client has disconnected."""
    payer = _payer()
    if payer.has_client_left():
        raise ClientLeftError
    return payer


def work_left_s(kind: WorkKind) -> float:
    """Return the seconds that the next piece of this kind may take. Raises ClientLeftError."""
    payer = _connected_payer()
    return payer.budget.left_s(payer.account, kind, monotonic())


def work_refusal(kind: WorkKind) -> WorkBudgetError | None:
    """Return the error for the next piece of this kind if no budget is left, else None. Raises ClientLeftError."""
    if work_left_s(kind) > 0.0:
        return None
    cut = _payer().spend(kind, PROBE_S)
    return None if cut is None else cut.error


def spend_work(kind: WorkKind, seconds: float) -> None:
    """Charge a piece of work. Raises WorkBudgetError if the charge exhausts a budget, ClientLeftError."""
    cut = _payer().spend(kind, seconds)
    _connected_payer()
    if cut is not None:
        raise cut.error


def charge_work(kind: WorkKind, seconds: float) -> None:
    """Charge a piece of work whose result is used even if the charge exhausts a budget. Raises ClientLeftError."""
    _payer().spend(kind, seconds)
    _connected_payer()


@contextmanager
def timed_work(kind: WorkKind) -> Iterator[None]:
    """Charge the CPU time of the enclosed code. Raises like `spend_work`, at the end of the block."""
    _connected_payer()
    started_s = thread_time()
    yield
    spend_work(kind, thread_time() - started_s)


def take_service_tokens() -> int:
    """Return the service tokens to charge for this request's text work since the last call."""
    payer = _payer()
    charged, payer.num_charged_tokens = payer.num_charged_tokens, payer.account.service_tokens
    return max(0, payer.num_charged_tokens - charged)
