"""The server's side of the processes that render chat templates: started, asked, ended when they take too long.

A model has at most two, the second started when a request finds the first busy. A helper renders for one thread at a
time; what takes longer than `RENDER_S` is killed with its process, and the next rendering starts another. A helper that
its model no longer needs waits for the next model. All end with this process: their stdin closes.
"""

import atexit
import sys
import threading

from quire.core.work_budget import WorkKind
from quire.errors import CapacityError, EngineDeadError, InvalidTextError, TemplateError
from quire.text.chat.rendering import wire
from quire.text.chat.rendering.wire import LoadTemplate, Render, Rendered, TemplateRefused, ToServer
from quire.text.helper_process import Helper, StoppedError
from quire.text.text_work import current_work

COMMAND = (sys.executable, "-m", "quire.text.chat.rendering.process")
RENDER_S = 2.0
MAX_FOR_A_MODEL = 2
MAX_IDLE = 2


class IdleHelpers:
    """Helpers between two models: starting one costs more than a hundred renderings."""

    def __init__(self) -> None:
        self._idle: list[Helper] = []
        # A template that is collected as garbage gives its helpers back, in the middle of whatever its thread does.
        self._lock = threading.RLock()

    def take(self) -> Helper:
        """One that waits, or a new one. Raises OSError if none can be started."""
        with self._lock:
            while self._idle:
                helper = self._idle.pop()
                if helper.is_alive:
                    return helper
                helper.kill()
        return Helper(COMMAND)

    def give_back(self, helper: Helper) -> None:
        """Its model needs it no more."""
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(helper)
                return
        helper.kill()

    def kill_all(self) -> None:
        """At the end of this process."""
        with self._lock:
            idle, self._idle = self._idle, []
        for helper in idle:
            helper.kill()


IDLE = IdleHelpers()
atexit.register(IDLE.kill_all)


class Helpers:
    """The helpers of one model, each with its template loaded. Safe from several threads."""

    def __init__(self, load: LoadTemplate) -> None:
        self._load = wire.encode_frame(load)
        self._changed = threading.Condition()
        self._num_helpers = 0
        """Those that are free, busy or being started."""
        self._free: list[Helper] = []
        self._busy: set[Helper] = set()
        self._is_closed = False

    def load(self) -> ToServer:
        """Start the first helper and hear what it says of the template. Raises TemplateError if it was stopped."""
        with self._changed:
            self._num_helpers += 1
        helper, answer = self._start()
        self._return(helper)
        return answer

    def render(self, request: Render) -> ToServer:
        """What came of it. Raises TemplateError if it had to be stopped."""
        message, work = _encoded(request), current_work()
        if (refusal := work.refusal(WorkKind.TEMPLATE)) is not None:
            raise refusal
        helper = self._take()
        try:
            answer = helper.request(message, wire.read_to_server, RENDER_S)
        except BaseException as error:
            helper.kill()
            self._drop(helper)
            if not isinstance(error, StoppedError):
                raise
            work.charge(WorkKind.TEMPLATE, 0.0 if error.is_starved else RENDER_S)
            raise self._refusal(error) from None
        self._return(helper)
        if isinstance(answer, Rendered | TemplateRefused):
            work.charge(WorkKind.TEMPLATE, answer.spent_s)
        return answer

    def close(self) -> None:
        """The model is closed: what is being rendered ends at once."""
        with self._changed:
            self._is_closed = True
            free, self._free = self._free, []
            for helper in self._busy:
                helper.stop()
            self._changed.notify_all()
        for helper in free:
            IDLE.give_back(helper)

    def _take(self) -> Helper:
        """A helper for this thread: a free one, a new one, or the first to become free."""
        with self._changed:
            while not self._free and self._num_helpers >= MAX_FOR_A_MODEL and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                raise EngineDeadError("the model is closed; open it again")
            while self._free:
                helper = self._free.pop()
                if helper.is_alive:
                    self._busy.add(helper)
                    return helper
                helper.kill()  # the system may have ended it for its own reasons
                self._num_helpers -= 1
            self._num_helpers += 1
        return self._start()[0]

    def _start(self) -> tuple[Helper, ToServer]:
        """A helper of our own, busy, with the template loaded; it is counted already."""
        helper = None
        try:
            helper = IDLE.take()
            answer = helper.request(self._load, wire.read_to_server, RENDER_S)
        except BaseException as error:
            self._drop(helper)
            raise _not_started(error) from None
        with self._changed:
            self._busy.add(helper)
        return helper, answer

    def _return(self, helper: Helper) -> None:
        with self._changed:
            self._busy.discard(helper)
            self._changed.notify_all()
            if not self._is_closed:
                self._free.append(helper)
                return
        helper.kill()

    def _drop(self, helper: Helper | None) -> None:
        with self._changed:
            self._num_helpers -= 1
            if helper is not None:
                self._busy.discard(helper)
            self._changed.notify_all()

    def _refusal(self, stopped: StoppedError) -> Exception:
        if self._is_closed:
            return EngineDeadError("the model was closed during rendering")
        if stopped.is_starved:
            why = f"the chat template process got too little processor time within {RENDER_S:g} s and is replaced"
            return CapacityError(f"{why}; try again", code="renderer_starved")
        rule = f"expected the chat template to finish within {RENDER_S:g} s, it {stopped}"
        way_out = "send fewer or shorter messages, or use the completions endpoint"
        return TemplateError(f"{rule}; {way_out}", code="rendering_stopped")


def _not_started(error: BaseException) -> BaseException:
    match error:
        case OSError():
            why = f"cannot start a process for the chat template: {error.strerror or error}; try again"
            return CapacityError(why, code="process_not_started")
        case StoppedError():
            rule = f"expected the chat template to load within {RENDER_S:g} s, it {error}"
            way_out = "use the completions endpoint with a plain prompt, or start the server with another template"
            return TemplateError(f"{rule}; {way_out}", code="loading_stopped")
    return error


def _encoded(request: Render) -> bytes:
    try:
        return wire.encode_frame(request)
    except RecursionError:
        raise InvalidTextError(wire.TOO_DEEP) from None
    except (TypeError, ValueError) as error:
        rule = f"expected a chat of JSON values: {error}; send whole characters, numbers and lists"
        raise InvalidTextError(rule, code="not_json") from None
