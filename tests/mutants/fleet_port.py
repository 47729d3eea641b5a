"""Bugs of a fleet in flight: who has a request, what becomes of it when that member goes, and a member's own desk."""

from tests.mutants.kill import Mutant

TESTS = (
    "tests/unit/fleet/gateway/test_port.py",
    "tests/unit/fleet/member/test_service.py",
    "tests/property/test_fleet_port.py",
)

PORT = "fleet/gateway/port.py"
REQUEST = "fleet/gateway/request.py"
MEMBERS = "fleet/gateway/members.py"
DESK = "fleet/member/service.py"

MUTANTS = [
    # -- who is let in --
    Mutant("a gateway that goes down lets in", PORT, "        if self.is_draining:\n", "        if False:\n"),
    Mutant("any number is held", PORT, "elif len(self._held) >= self._max_held:", "elif False:"),
    Mutant(
        "one more is held than may be", PORT, "len(self._held) >= self._max_held", "len(self._held) > self._max_held"
    ),
    Mutant("who is held does not expire", PORT, "flight.ledger.expire(now_s)", "[]"),
    Mutant("who is ready gets nobody that waited", PORT, "one.after is MemberState.READY", "False"),
    Mutant("who was turned away is not tried again", PORT, "            flight.refusals.clear()\n", ""),
    # -- moves --
    Mutant("who is gone keeps its requests", PORT, "                self._move_all(one.member)\n", ""),
    Mutant("who is given up keeps its link", PORT, "                    known.link.end(why)\n", ""),
    Mutant("another link's end is this one's", PORT, "known is not None and known.link is link", "known is not None"),
    Mutant(
        "a question outlives whom it was asked",
        PORT,
        "                known.calls.fail_all(EngineDeadError(",
        "                str(EngineDeadError(",
    ),
    Mutant("a move is not counted", PORT, "                flight.is_moving = True\n", ""),
    Mutant("every placing is a move", PORT, "self._num_moved += flight.is_moving", "self._num_moved += 1"),
    Mutant("other bits are not told", PORT, "            self._num_moved_inexact += 1\n", ""),
    Mutant("late words count", PORT, "flight is None or flight.member != link.address", "flight is None"),
    Mutant("a late refusal counts", PORT, "is_current and isinstance(event, Refused)", "isinstance(event, Refused)"),
    Mutant("a late replay counts", PORT, "is_current and isinstance(event, Replayed)", "isinstance(event, Replayed)"),
    Mutant("bits are those of who has it last", PORT, " and flight.exactness is None:", ":"),
    Mutant("its names are another member's", PORT, "card.info.identity.fingerprint)", "card.model)"),
    # -- refusals --
    Mutant("who has begun is sent away", PORT, "if has_tried and not flight.has_begun:", "if has_tried:"),
    Mutant("one refusal is enough", PORT, "len(flight.refusals) > MAX_OTHERS", "len(flight.refusals) > 0"),
    Mutant("all members are asked", PORT, "has_tried = len(flight.refusals) > MAX_OTHERS or ", "has_tried = "),
    Mutant("whoever is wrong is sent on", PORT, " or not isinstance(error, FULL + LEAVING)", ""),
    Mutant("the longest wait is told", REQUEST, "best = min(full", "best = max(full"),
    Mutant("who waited is a suspect", REQUEST, "            entry.num_strikes = num_strikes\n", "            pass\n"),
    Mutant("nobody is ever a suspect", REQUEST, "if was_running else []", "if False else []"),
    Mutant(
        "what was answered is not computed before",
        REQUEST,
        "left[0].produced if len(left) == 1",
        "() if len(left) == 1",
    ),
    # -- members --
    Mutant("another model is a member", MEMBERS, "info.identity.fingerprint != first.identity.fingerprint", "False"),
    Mutant("other tokens are a member's", MEMBERS, "info.vocabulary_size != first.vocabulary_size", "False"),
    Mutant("one member is two", MEMBERS, "if link.address in self.known:", "if False:"),
    Mutant(
        "heard more than was said",
        MEMBERS,
        "if not 0 <= num_new <= len(known.unacknowledged_s):",
        "if num_new < 0:",
    ),
    Mutant(
        "what is on its way is forgotten",
        MEMBERS,
        "known.unacknowledged_s[0] if known.unacknowledged_s else self._clock()",
        "self._clock()",
    ),
    Mutant("a gateway that slept doubts all", MEMBERS, "now_s - last_s > LATE_S", "False"),
    Mutant("a suspect is forgiven by a sleep", MEMBERS, "is not MemberState.SUSPECT:\n", "is not None:\n"),
    Mutant("a worker's end is no doubt", MEMBERS, "return self.router.doubt(member)", "return ()"),
    Mutant(
        "a long prompt goes to a short member", MEMBERS, "max_sequence_tokens > num_tokens", "max_sequence_tokens > 0"
    ),
    Mutant(
        "who could be ready soon is not waited for",
        MEMBERS,
        "are_away or any(map(self._may_be_ready_soon, able))",
        "are_away",
    ),
    Mutant("all bits are equal", MEMBERS, "self.known[one].exactness != flight.exactness", "False"),
    Mutant("other bits are never taken", MEMBERS, " or self.router.choose(prompt, now_s, exclude)", ""),
    Mutant(
        "who turned it away is asked again",
        MEMBERS,
        "exclude = flight.refusals.keys() | unable",
        "exclude = set(unable)",
    ),
    # -- a member's desk --
    Mutant(
        "who never said hello is served",
        DESK,
        "        if gateway is None:\n            raise MessageError(",
        "        if gateway is None and False:\n            raise MessageError(",
    ),
    Mutant("an old epoch begins anew", DESK, "command.epoch <= before.epoch", "command.epoch < before.epoch"),
    Mutant(
        "the assignment before runs on",
        DESK,
        "            self._supervisor.cancel(gateway.names[command.request_id])\n",
        "            pass\n",
    ),
    Mutant("a member that drains takes new ones", DESK, "        if self.is_draining:\n", "        if False:\n"),
    Mutant(
        "another model's request is taken",
        DESK,
        "if (wanted.format_version, wanted.model) != (own.format_version, own.model):",
        "if False:",
    ),
    Mutant("a gateway that is gone still wants", DESK, "            self._supervisor.cancel(name)\n", ""),
    Mutant(
        "what was to be computed is for ever",
        DESK,
        "            self._expect(self._taken.pop(name), 0)\n",
        "            self._taken.pop(name)\n",
    ),
    Mutant("a silent gateway is waited for", DESK, "now_s - gateway.last_received_s > MAX_SILENT_S", "False"),
    Mutant(
        "what is cached is to be computed",
        DESK,
        "taken.num_prompt_tokens - event.num_cached_tokens",
        "taken.num_prompt_tokens",
    ),
    Mutant("a prompt that is computed is to be", DESK, "elif isinstance(event, FirstToken):", "elif False:"),
    Mutant(
        "words of one epoch are another's",
        DESK,
        "request_id=taken.request_id, epoch=taken.epoch)",
        "request_id=taken.request_id)",
    ),
    Mutant("assignments are not counted", DESK, "                gateway.num_received += 1\n", ""),
    Mutant("a farewell is not waited for", DESK, "        self._unacknowledged = set(self._gateways)\n", ""),
    Mutant("load is old news", DESK, "is_due = self._num_uncomputed != gateway.num_reported_tokens or ", "is_due = "),
]
