"""Records function calls in every Python process of a traced server, loaded because its folder is in PYTHONPATH.

A call is recorded if it enters a module of quire from any other module. With it are recorded the classes of quire of
its arguments and its result, also those of elements of lists, tuples and dicts. Coroutines and generators are recorded
when they start, not each time they resume.

One JSON line for each call, in `SEAM_TRACE_FOLDER/<pid>`: seconds, "call" or "return", caller, callee, classes.
"""

import dis
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

FOLDER = os.environ.get("SEAM_TRACE_FOLDER", "")
MAX_ELEMENTS = 16
_start_offsets: dict[CodeType, int] = {}
FLUSH_S, NOT_QUIRE = 0.1, ""
_names: dict[CodeType, str] = {}
_flushed_s = 0.0
_lock = threading.Lock()
_lines: list[tuple[float, str, str, str, tuple[str, ...]]] = []


def _start_offset(code: CodeType) -> int:
    """Return the instruction offset of a frame that is entered for the first time."""
    if code not in _start_offsets:
        steps = dis.get_instructions(code)
        _start_offsets[code] = next((step.offset for step in steps if step.opname == "RESUME"), 0)
    return _start_offsets[code]


def _classes(values: list[object]) -> tuple[str, ...]:
    names = set()
    for value in values:
        objects: list[object] = [value]
        if type(value) in (list, tuple):  # no subclass, which may be a class of quire
            objects += list(value[:MAX_ELEMENTS])  # type: ignore[index]
        elif type(value) is dict:
            objects += list(value.values())[:MAX_ELEMENTS]
        for element in objects:
            cls = type(element)
            if cls.__module__.startswith("quire.") and cls is not type:
                names.add(f"{cls.__module__}.{cls.__qualname__}")
    return tuple(sorted(names))


def _hook(frame: FrameType, event: str, value: object) -> None:
    # Most calls are outside quire and must cost almost nothing; otherwise loading takes minutes.
    name = _names.get(frame.f_code)
    if name is None:
        name = _names[frame.f_code] = _name_of(frame)
    if name == NOT_QUIRE or event not in ("call", "return"):
        return
    module, caller_frame = frame.f_globals["__name__"], frame.f_back
    caller = str(caller_frame.f_globals.get("__name__", "")) if caller_frame is not None else ""
    if caller == module:
        return
    code, now_s = frame.f_code, time.monotonic()
    if event == "return":
        _lines.append((now_s, "return", caller, name, _classes([value])))
    elif frame.f_lasti <= _start_offset(code):
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals[parameter] for parameter in parameters if parameter in frame.f_locals]
        _lines.append((now_s, "call", caller, name, _classes(values)))
        _flush(now_s)


def _name_of(frame: FrameType) -> str:
    module, code = str(frame.f_globals.get("__name__", "")), frame.f_code
    is_ours = module.startswith("quire.") and not code.co_name.startswith("<")
    return f"{module}.{code.co_qualname}" if is_ours else NOT_QUIRE


def _flush(now_s: float) -> None:
    """Write periodically, not at exit: a process may be killed."""
    global _flushed_s  # noqa: PLW0603 - a profile hook has no object to hold state
    if now_s - _flushed_s < FLUSH_S or not _lock.acquire(blocking=False):
        return
    _flushed_s = now_s
    lines = _lines[:]
    del _lines[: len(lines)]
    with (Path(FOLDER) / str(os.getpid())).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    _lock.release()


if FOLDER:
    threading.setprofile(_hook)
    sys.setprofile(_hook)
