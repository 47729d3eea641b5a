"""Bugs of clocks, epochs and requests from elsewhere; one small change each."""

from tests.mutants.kill import Mutant

TESTS = (
    "tests/property/test_ages.py",
    "tests/property/test_epochs.py",
    "tests/property/test_handed_over.py",
    "tests/property/test_ledger.py",
    "tests/unit/worker/test_ledger.py",
    "tests/unit/worker/test_shared_status.py",
    "tests/unit/worker/test_supervisor_alone.py",
    "tests/unit/core/memory/test_prefix_tree.py",
    "tests/unit/client/prefix/test_explanation.py",
    "tests/unit/client/test_handed_over.py",
    "tests/unit/client/test_engines.py",
)

COMMANDS = "engine/commands.py"
ENGINE = "engine/engine.py"
REPLY = "client/reply/reply.py"
LEDGER = "worker/parent/ledger.py"
ROWS = "core/scheduling/rows.py"
TREE = "core/memory/prefix_tree.py"
STATUS = "worker/child/shared_status.py"
SESSION = "worker/parent/session.py"
SUPERVISOR = "worker/parent/supervisor.py"

MUTANTS = [
    # -- ages --
    Mutant(
        "an age is taken for an instant",
        COMMANDS,
        "_Assignment.to_request",
        'now_s - fields.pop("age_s")',
        'fields.pop("age_s")',
    ),
    Mutant(
        "a time left is taken for an instant", COMMANDS, "_Assignment.to_request", "else now_s + left_s", "else left_s"
    ),
    Mutant(
        "who is asked again is new",
        COMMANDS,
        "_Assignment.of",
        'now_s - fields.pop("arrival_s")',
        '0.0 * fields.pop("arrival_s")',
    ),
    Mutant("a deadline is sent as it is", COMMANDS, "_Assignment.of", "deadline_s - now_s", "deadline_s"),
    Mutant("an admission is told as if it were now", ROWS, "backdate_admissions", "age_s=step_s", "age_s=0.0"),
    Mutant(
        "a reply forgets how long ago an admission was",
        REPLY,
        "Reply._take",
        "self._clock() - event.age_s",
        "self._clock()",
    ),
    Mutant(
        "an eviction says when it was", TREE, "PrefixTree.divergence", "max(0.0, now_s - evicted_at_s)", "evicted_at_s"
    ),
    Mutant("whoever asks an idle engine gets an old time", ENGINE, "Engine.explain", "self.memory.advance(now_s)", ""),
    Mutant("the beat stands still", STATUS, "SharedStatus.record_heartbeat", "self._num_heartbeats += 1", ""),
    Mutant(
        "a beat is never seen to move",
        SESSION,
        "WorkerSession.last_progress_s",
        "if progress != self.last_counts:",
        "if not self.progress_s:",
    ),
    Mutant(
        "a look is a beat", SESSION, "WorkerSession.last_progress_s", "if progress != self.last_counts:", "if True:"
    ),
    # -- epochs --
    Mutant("tokens name no assignment", ROWS, "token_event", "is_forced, epoch=epoch)", "is_forced)"),
    Mutant(
        "a stranger is taken for somebody late",
        LEDGER,
        "Ledger.take",
        "if entry is None and 0 < event.epoch <= self._last_epoch:",
        "if entry is None:",
    ),
    Mutant(
        "who names no assignment is taken for somebody late",
        LEDGER,
        "Ledger.take",
        "and 0 < event.epoch <= self",
        "and event.epoch <= self",
    ),
    Mutant("what is late is a lie", LEDGER, "Ledger.take", "0 < event.epoch <= self._last_epoch:", "False:"),
    Mutant(
        "an assignment's number is enough",
        LEDGER,
        "Ledger.take",
        "if entry is None or entry.request.request_id != event.request_id:",
        "if entry is None:",
    ),
    Mutant(
        "the words of a dead worker are heard",
        LEDGER,
        "Ledger._hold",
        "self._end_assignment(entry)\nentry.dropped_indexes.clear()",
        "entry.epoch = None\nentry.dropped_indexes.clear()",
    ),
    Mutant(
        "numbers begin anew with each worker",
        LEDGER,
        "Ledger.hold_all",
        "self._isolated = None\nfor entry in",
        "self._isolated, self._last_epoch = None, 0\nfor entry in",
    ),
    Mutant(
        "who was taken back runs on",
        LEDGER,
        "Ledger._take_back",
        "return [Cancel(entry.request.request_id) for entry in entries]",
        "return []",
    ),
    Mutant(
        "a suspect has company", LEDGER, "Ledger.due_commands", "[*self._take_back(), self._assign", "[self._assign"
    ),
    Mutant(
        "who has left is asked again",
        LEDGER,
        "Ledger._take_back",
        "if not entry.is_cancelled and not entry.is_answered]",
        "if not entry.is_answered]",
    ),
    Mutant(
        "who has all it wants is asked again",
        LEDGER,
        "Ledger._take_back",
        "if not entry.is_cancelled and not entry.is_answered]",
        "if not entry.is_cancelled]",
    ),
    # -- from elsewhere --
    Mutant(
        "a ledger begins with nothing",
        LEDGER,
        "Ledger.add",
        "{answer.index: [*answer.produced] for",
        "{answer.index: [] for",
    ),
    Mutant("what was told elsewhere is told again", LEDGER, "Ledger.add", "if request.has_begun:", "if False:"),
    Mutant(
        "who was let in elsewhere must ask again",
        LEDGER,
        "LedgerEntry.command_for",
        "self.is_queued or request.has_begun else",
        "self.is_queued else",
    ),
    Mutant(
        "tokens from elsewhere were told here",
        LEDGER,
        "LedgerEntry.has_sent_output",
        "> len(answer.produced) for",
        "> 0 for",
    ),
    Mutant(
        "who has begun has no place",
        LEDGER,
        "LedgerEntry.command_for",
        "or bool(self.ends) or any(self.tokens.values())",
        "or bool(self.ends)",
    ),
    Mutant(
        "text begins at the seam",
        REPLY,
        "Reply._resumed_answer",
        "text = answer.text.push(token_id)",
        'text = ""',
    ),
    Mutant(
        "who has begun is sent away at the door",
        SUPERVISOR,
        "Supervisor._check_room",
        "and not request.has_begun:",
        ":",
    ),
]
