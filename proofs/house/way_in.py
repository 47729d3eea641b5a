"""Section "way in": how far a chat goes from its first byte until the scheduler has queued it, beside what it was.

The tracer of `proofs/seam/hops.py` counts on a real server. A form is a class that carries the request itself, whole
or in part; all other classes do something with it, or are a part of one, and stand in `OTHERS`: a new class counts as a
form until it is listed there. A return is a room, a folder of the source, that gets the request again after it left it:
of the calls that pass a form, until the port has the request.
"""

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from statistics import median

from benchmarks.record import ROOT, say
from proofs.framework.proof import Proof, section
from proofs.seam.hops import Call, Way, traced

BEFORE_COMMIT, HOPS_BEFORE, CLASSES_BEFORE = "4ff5e8cf", 143.5, 59
"""What the same tracer counted in the tree of this commit."""
MOST_OF_BEFORE, MAX_FORMS, MAX_RETURNS = 0.7, 13, 3
PORT = "Supervisor.submit"
OTHERS = frozenset((
    "Acceptor", "CacheReport", "Chat", "ChatTemplate", "ChatTokenizer", "ChatWriter", "Engine", "FieldNames",
    "Granted", "HelperPool", "KeyRing", "Ledger", "ModelEntry", "ModelManager", "Models", "NoTrace", "Origins",
    "PriorityClass", "PromptParts", "ResolvedSampling", "RetryReservations", "Scheduler", "ServedModel",
    "ServerProtocol", "Shares", "Supervisor", "TemplateArguments", "TextBudget", "TextModel", "TextPool", "Tokenizer",
    "WaitingQueue", "WorkAccount", "WorkerProcess",
))  # fmt: skip
"""Classes that do something with a request, and parts of its forms: parameters, options, tokens' origins."""


@section("way in")
def prove_way_in(proof: Proof) -> None:
    calls = [trace.calls_in() for trace in (traced() for _ in range(proof.sized(quick=1, full=3)))]
    ways, names = [Way.of(one) for one in calls], [forms(one) for one in calls]
    say(f"    forms: {', '.join(names[0])}")
    say(f"    rooms: {' > '.join(stays(calls[0]))}")
    before = f"{MOST_OF_BEFORE} of the figure at {BEFORE_COMMIT}"
    proof.at_most("request_names", median(map(len, names)), MAX_FORMS)
    proof.at_most("hops_in", median(len(way.hops) for way in ways), MOST_OF_BEFORE * HOPS_BEFORE, before)
    proof.at_most("classes_in", median(len(way.forms) for way in ways), MOST_OF_BEFORE * CLASSES_BEFORE, before)
    proof.at_most("returns_in", median(map(num_returns, calls)), MAX_RETURNS)


def forms(calls: Sequence[Call]) -> list[str]:
    """What the request is called on the way, as classes; the scope of the ASGI server is one that has no class."""
    names = {name.rpartition(".")[2] for call in calls for name in call.classes}
    return ["scope", *sorted(names - OTHERS)]


def stays(calls: Sequence[Call]) -> list[str]:
    """The rooms that get the request one after the other, until the port has it."""
    entered = [call for call in calls if not call.is_return]
    last = next(at for at, call in enumerate(entered) if call.callee.endswith(PORT))
    passed = [call for call in entered[: last + 1] if forms([call])[1:]]
    return [room for room, _ in groupby(_room(call.callee) for call in passed)]


def num_returns(calls: Sequence[Call]) -> int:
    """Stays in rooms that were left before."""
    rooms = stays(calls)
    return len(rooms) - len(set(rooms))


@cache
def _room(callee: str) -> str:
    """The folder of the source that a function stands in."""
    parts = callee.split(".")
    depth = next(at for at in range(len(parts), 0, -1) if (ROOT / "src").joinpath(*parts[:at]).is_dir())
    return ".".join(parts[1:depth])
