"""Loaded by every Python process of a traced server, because its folder stands in PYTHONPATH: writes down calls.

A call counts if it enters a module of quire from another module, quire's or not. Beside it stand the classes of quire
whose instances it is given or returns, looked for one level deep in plain containers. Coroutines and generators count
when they are begun, not each time they go on.

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
MAX_LOOKED_AT = 16
_begins: dict[CodeType, int] = {}
FLUSH_S = 0.1
NOT_OURS = ""
_names: dict[CodeType, str] = {}
_flushed_s = 0.0
_lock = threading.Lock()
_lines: list[tuple[float, str, str, str, tuple[str, ...]]] = []


def _begin(code: CodeType) -> int:
    """Where a frame stands when it is entered for the first time."""
    if code not in _begins:
        _begins[code] = next((one.offset for one in dis.get_instructions(code) if one.opname == "RESUME"), 0)
    return _begins[code]


def _classes(values: list[object]) -> tuple[str, ...]:
    found = set()
    for value in values:
        inside: list[object] = [value]
        if type(value) in (list, tuple):  # not a class of ours that happens to be one
            inside += list(value[:MAX_LOOKED_AT])  # type: ignore[index]
        elif type(value) is dict:
            inside += list(value.values())[:MAX_LOOKED_AT]
        for one in inside:
            kind = type(one)
            if kind.__module__.startswith("quire.") and kind is not type:
                found.add(f"{kind.__module__}.{kind.__qualname__}")
    return tuple(sorted(found))


def _hook(frame: FrameType, event: str, value: object) -> None:
    # Most calls are none of ours: they must cost next to nothing, or loading takes minutes.
    name = _names.get(frame.f_code)
    if name is None:
        name = _names[frame.f_code] = _named(frame)
    if name == NOT_OURS or event not in ("call", "return"):
        return
    module, back = frame.f_globals["__name__"], frame.f_back
    caller = str(back.f_globals.get("__name__", "")) if back is not None else ""
    if caller == module:
        return
    code, now_s = frame.f_code, time.monotonic()
    if event == "return":
        _lines.append((now_s, "return", caller, name, _classes([value])))
    elif frame.f_lasti <= _begin(code):
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals[one] for one in given if one in frame.f_locals]
        _lines.append((now_s, "call", caller, name, _classes(values)))
        _flush(now_s)


def _named(frame: FrameType) -> str:
    module, code = str(frame.f_globals.get("__name__", "")), frame.f_code
    is_ours = module.startswith("quire.") and not code.co_name.startswith("<")
    return f"{module}.{code.co_qualname}" if is_ours else NOT_OURS


def _flush(now_s: float) -> None:
    """Now and then, not at the end: a process may be left without one."""
    global _flushed_s  # noqa: PLW0603 - a hook has no other place
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
