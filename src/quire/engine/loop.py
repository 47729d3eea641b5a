"""The one thread that steps an engine. Others hand it commands and are told what happened.

    callers ─► commands ─► [ drain · step · tell ] ─► listener, once per step

An idle engine sleeps on the command queue. What goes wrong in a step is a bug or the end of the device: the thread
says so and ends; nothing is retried here. A command that comes too late for a step is refused, never forgotten.
"""

import threading
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic

from quire.core.digests import Namespace
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.port import Answered, Listener, OnExplained, OnFailure
from quire.errors import EngineDeadError, QuireError


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    answered: Answered


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str
    index: int | None


@dataclass(frozen=True, slots=True)
class _Explain:
    namespace: Namespace
    prompt: tuple[int, ...]
    told: OnExplained


class _Close:
    """The last command."""


class EngineLoop:
    """Owns the engine from `start` to `close`. All callbacks run on its thread and must return at once."""

    def __init__(self, engine: Engine, listener: Listener, failed: OnFailure) -> None:
        self._engine = engine
        self._listener = listener
        self._failed = failed
        self._commands: SimpleQueue[_Submit | _Cancel | _Explain | _Close] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_over = False
        """Guarded by the lock: once true, no command is put into the queue."""
        self._thread = threading.Thread(target=self._run, name="quire-steps", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def submit(self, request: Request, answered: Answered) -> None:
        """Queue a request; `answered` gets None, or why it was refused."""
        with self._lock:
            if not self._is_over:
                self._commands.put(_Submit(request, answered))
                return
        answered(EngineDeadError("the engine has stopped; start it again"))

    def explain(self, namespace: Namespace, prompt: tuple[int, ...], told: OnExplained) -> None:
        """Ask why a prompt is not in the cache; answered between two steps."""
        with self._lock:
            if not self._is_over:
                self._commands.put(_Explain(namespace, prompt, told))
                return
        told(EngineDeadError("the engine has stopped; start it again"))

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its answers alone, if it lives."""
        self._commands.put(_Cancel(request_id, index))

    def close(self) -> None:
        """Stop after the step in flight, and wait for it."""
        self._commands.put(_Close())
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._obey():
                events = self._engine.step(monotonic)
                if events:
                    self._listener(events)
        except BaseException as error:
            self._failed(error)
        finally:
            self._refuse_the_rest()
            self._engine.close()

    def _refuse_the_rest(self) -> None:
        with self._lock:
            self._is_over = True
        while True:
            try:
                command = self._commands.get(block=False)
            except Empty:
                return
            if isinstance(command, _Submit):
                command.answered(EngineDeadError("the engine stopped before it saw this request; ask again"))
            elif isinstance(command, _Explain):
                command.told(EngineDeadError("the engine stopped before it was asked; ask again"))

    def _obey(self) -> bool:
        """Carry out all commands that are there, waiting for one if there is nothing to do; false ends the thread."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except Empty:
                return True
            match command:
                case _Submit():
                    self._submit(command)
                case _Cancel():
                    self._engine.cancel(command.request_id, command.index)
                case _Explain():
                    self._explain(command)
                case _Close():
                    return False

    def _explain(self, command: _Explain) -> None:
        try:
            found = self._engine.explain(command.namespace, command.prompt)
        except Exception as error:
            command.told(EngineDeadError(f"the engine could not look into its cache: {error!r}"))
            raise
        command.told(found)

    def _submit(self, command: _Submit) -> None:
        try:
            self._engine.submit(command.request)
        except QuireError as error:
            command.answered(error)
        except Exception as error:
            # Whoever asked must hear of it, whatever it does to the engine.
            command.answered(EngineDeadError(f"the engine could not take the request: {error!r}"))
            raise
        else:
            command.answered(None)
