"""Section "way in": counts the calls of a chat from its first byte until the scheduler has queued it.

The tracer of `proofs/seam/hops.py` counts on a real server. A form is a class that carries the request or a part of it.
All other classes on the way are listed in `OTHERS`; a new class counts as a form until it is listed there. A room is a
folder of the source. A return is a second stay of the request in a room that it had left, counted from the calls that
pass a form until `PORT` is called. Bounds are relative to an earlier commit.
"""

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from statistics import median

from benchmarks.record import ROOT, say
from proofs.framework.proof import Proof, section
from proofs.seam.hops import Call, CallPath, trace_chat

BEFORE_COMMIT, HOPS_BEFORE, CLASSES_BEFORE = "4ff5e8cf", 143.5, 59
"""What the same tracer counted at this commit."""
MAX_SHARE_OF_BEFORE, MAX_FORMS, MAX_RETURNS = 0.7, 13, 3
PORT = "Supervisor.submit"
OTHERS = frozenset((
    "Acceptor", "CacheReport", "Chat", "ChatTemplate", "ChatTokenizer", "ChatWriter", "Engine", "FieldNames",
    "Granted", "HelperPool", "KeyRing", "Ledger", "ModelEntry", "ModelManager", "Models", "NoTrace", "Origins",
    "PriorityClass", "PromptParts", "ResolvedSampling", "RetryReservations", "Scheduler", "ServedModel",
    "ServerProtocol", "Shares", "Supervisor", "TemplateArguments", "TextBudget", "TextModel", "TextPool", "Tokenizer",
    "WaitingQueue", "WorkAccount", "WorkerProcess",
))  # fmt: skip
"""Classes that handle requests, and parts of forms: parameters, options, origins of tokens."""


@section("way in")
def prove_way_in(proof: Proof) -> None:
    calls = [trace.calls_in() for trace in (trace_chat() for _ in range(proof.sized(quick=1, full=3)))]
    ways, names = [CallPath.of(path) for path in calls], [forms(path) for path in calls]
    say(f"    forms: {', '.join(names[0])}")
    say(f"    rooms: {' > '.join(stays(calls[0]))}")
    before = f"{MAX_SHARE_OF_BEFORE} of the figure at {BEFORE_COMMIT}"
    proof.at_most("request_names", median(map(len, names)), MAX_FORMS)
    proof.at_most("hops_in", median(len(way.hops) for way in ways), MAX_SHARE_OF_BEFORE * HOPS_BEFORE, before)
    proof.at_most("classes_in", median(len(way.forms) for way in ways), MAX_SHARE_OF_BEFORE * CLASSES_BEFORE, before)
    proof.at_most("returns_in", median(map(num_returns, calls)), MAX_RETURNS)


def forms(calls: Sequence[Call]) -> list[str]:
    """Names of the forms; "scope" stands for the scope of the ASGI server, which is not an instance of a class."""
    names = {name.rpartition(".")[2] for call in calls for name in call.classes}
    return ["scope", *sorted(names - OTHERS)]


def stays(calls: Sequence[Call]) -> list[str]:
    """Rooms that get the request one after the other, until `PORT` is called."""
    calls_in = [call for call in calls if not call.is_return]
    port_index = next(index for index, call in enumerate(calls_in) if call.callee.endswith(PORT))
    form_calls = [call for call in calls_in[: port_index + 1] if forms([call])[1:]]
    return [room for room, _ in groupby(_room(call.callee) for call in form_calls)]


def num_returns(calls: Sequence[Call]) -> int:
    """Count stays in rooms that the request had left before."""
    rooms = stays(calls)
    return len(rooms) - len(set(rooms))


@cache
def _room(callee: str) -> str:
    """The source folder that contains a function."""
    parts = callee.split(".")
    depth = next(length for length in range(len(parts), 0, -1) if (ROOT / "src").joinpath(*parts[:length]).is_dir())
    return ".".join(parts[1:depth])
