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
    Mutant("a gateway that goes down lets in", PORT, "FleetPort.submit", "if self.is_draining:", "if False:"),
    Mutant("any number is held", PORT, "FleetPort.submit", "elif len(self.held) >= self._max_held:", "elif False:"),
    Mutant(
        "one more is held than may be",
        PORT,
        "FleetPort.submit",
        "len(self.held) >= self._max_held",
        "len(self.held) > self._max_held",
    ),
    Mutant("who is held does not expire", PORT, "FleetPort.tick", "flight.ledger.expire(now_s)", "[]"),
    Mutant(
        "who is ready gets nobody that waited", PORT, "FleetPort._followed", "one.after is MemberState.READY", "False"
    ),
    Mutant("who was turned away is not tried again", PORT, "FleetPort._place_held", "flight.refusals.clear()", ""),
    # -- moves --
    Mutant("who is gone keeps its requests", PORT, "FleetPort._followed", "self._move_all(one.member)", ""),
    Mutant("who is given up keeps its link", PORT, "FleetPort._followed", "known.link.end(why)", ""),
    Mutant(
        "another link's end is this one's",
        PORT,
        "FleetPort.lost",
        "known is not None and known.link is link",
        "known is not None",
    ),
    Mutant(
        "a question outlives whom it was asked",
        PORT,
        "FleetPort._followed",
        "known.calls.fail_all(EngineDeadError(",
        "str(EngineDeadError(",
    ),
    Mutant("a move is not counted", PORT, "FleetPort._move_all", "flight.is_moving = True", ""),
    Mutant(
        "every placing is a move",
        PORT,
        "FleetPort._count_move",
        "self.counts.num_moved += flight.is_moving",
        "self.counts.num_moved += 1",
    ),
    Mutant("other bits are not told", PORT, "FleetPort._count_move", "self.counts.num_moved_inexact += 1", ""),
    Mutant(
        "late words count", PORT, "FleetPort._take", "flight is None or flight.member != link.address", "flight is None"
    ),
    Mutant(
        "a late refusal counts",
        PORT,
        "FleetPort._take",
        "is_current and isinstance(event, Refused)",
        "isinstance(event, Refused)",
    ),
    Mutant(
        "a late replay counts",
        PORT,
        "FleetPort._take",
        "is_current and isinstance(event, Replayed)",
        "isinstance(event, Replayed)",
    ),
    Mutant("bits are those of who has it last", PORT, "FleetPort._take", "and flight.exactness is None:", ":"),
    Mutant(
        "its names are another member's",
        PORT,
        "FleetPort._as_named_by",
        "card.info.identity.fingerprint)",
        "card.model)",
    ),
    # -- refusals --
    Mutant(
        "who has begun is sent away",
        PORT,
        "FleetPort._take_refusal",
        "if has_tried and not flight.has_begun:",
        "if has_tried:",
    ),
    Mutant(
        "one refusal is enough",
        PORT,
        "FleetPort._take_refusal",
        "len(flight.refusals) > MAX_OTHERS",
        "len(flight.refusals) > 0",
    ),
    Mutant(
        "all members are asked",
        PORT,
        "FleetPort._take_refusal",
        "has_tried = len(flight.refusals) > MAX_OTHERS or",
        "has_tried =",
    ),
    Mutant(
        "whoever is wrong is sent on", PORT, "FleetPort._take_refusal", "or not isinstance(error, FULL + LEAVING)", ""
    ),
    Mutant("the longest wait is told", REQUEST, "FleetRequest.best_refusal", "best = min(full", "best = max(full"),
    Mutant("who waited is a suspect", REQUEST, "FleetRequest.taken_back", "entry.num_strikes = num_strikes", "pass"),
    Mutant(
        "nobody is ever a suspect", REQUEST, "FleetRequest.taken_back", "if was_running else []", "if False else []"
    ),
    Mutant(
        "what was answered is not computed before",
        REQUEST,
        "FleetRequest.tokens",
        "left[0].produced if len(left) == 1",
        "() if len(left) == 1",
    ),
    # -- members --
    Mutant(
        "another model is a member",
        MEMBERS,
        "FleetMembers._checked",
        "info.identity.fingerprint != first.identity.fingerprint",
        "False",
    ),
    Mutant(
        "other tokens are a member's",
        MEMBERS,
        "FleetMembers._checked",
        "info.vocabulary_size != first.vocabulary_size",
        "False",
    ),
    Mutant("one member is two", MEMBERS, "FleetMembers.welcome", "if link.address in self.known:", "if False:"),
    Mutant(
        "heard more than was said",
        MEMBERS,
        "FleetMembers.report",
        "if not 0 <= num_new <= len(known.unacknowledged_s):",
        "if num_new < 0:",
    ),
    Mutant(
        "what is on its way is forgotten",
        MEMBERS,
        "FleetMembers.report",
        "known.unacknowledged_s[0] if known.unacknowledged_s else self._clock()",
        "self._clock()",
    ),
    Mutant("a gateway that slept doubts all", MEMBERS, "FleetMembers.advance", "now_s - last_s > LATE_S", "False"),
    Mutant(
        "a suspect is forgiven by a sleep",
        MEMBERS,
        "FleetMembers.advance",
        "is not MemberState.SUSPECT:",
        "is not None:",
    ),
    Mutant("a worker's end is no doubt", MEMBERS, "FleetMembers.beat", "return self.router.doubt(member)", "return ()"),
    Mutant(
        "a long prompt goes to a short member",
        MEMBERS,
        "FleetMembers._able",
        "max_sequence_tokens > num_tokens",
        "max_sequence_tokens > 0",
    ),
    Mutant(
        "who could be ready soon is not waited for",
        MEMBERS,
        "FleetMembers._may_come",
        "are_away or any(map(self._may_be_ready_soon, able))",
        "are_away",
    ),
    Mutant(
        "all bits are equal", MEMBERS, "FleetMembers.choose", "self.known[one].exactness != flight.exactness", "False"
    ),
    Mutant(
        "other bits are never taken",
        MEMBERS,
        "FleetMembers.choose",
        "or self.router.choose(prompt, now_s, exclude)",
        "",
    ),
    Mutant(
        "who turned it away is asked again",
        MEMBERS,
        "FleetMembers.choose",
        "exclude = flight.refusals.keys() | unable",
        "exclude = set(unable)",
    ),
    # -- a member's desk --
    Mutant(
        "who never said hello is served",
        DESK,
        "MemberService.receive",
        "if gateway is None:\nraise MessageError(",
        "if gateway is None and False:\n    raise MessageError(",
    ),
    Mutant(
        "an old epoch begins anew",
        DESK,
        "MemberService._assign",
        "command.epoch <= before.epoch",
        "command.epoch < before.epoch",
    ),
    Mutant(
        "the assignment before runs on",
        DESK,
        "MemberService._assign",
        "self._supervisor.cancel(gateway.names[command.request_id])",
        "pass",
    ),
    Mutant("a member that drains takes new ones", DESK, "MemberService._checked", "if self.is_draining:", "if False:"),
    Mutant(
        "another model's request is taken",
        DESK,
        "MemberService._checked",
        "if (wanted.format_version, wanted.model) != (own.format_version, own.model):",
        "if False:",
    ),
    Mutant("a gateway that is gone still wants", DESK, "MemberService.forget", "self._supervisor.cancel(name)", ""),
    Mutant(
        "what was to be computed is for ever",
        DESK,
        "MemberService.forget",
        "self._expect(self.assignments.pop(name), 0)",
        "self.assignments.pop(name)",
    ),
    Mutant(
        "a silent gateway is waited for",
        DESK,
        "MemberService.forget_silent",
        "now_s - gateway.last_received_s > MAX_SILENT_S",
        "False",
    ),
    Mutant(
        "what is cached is to be computed",
        DESK,
        "MemberService.listener",
        "taken.num_prompt_tokens - event.num_cached_tokens",
        "taken.num_prompt_tokens",
    ),
    Mutant(
        "a prompt that is computed is to be",
        DESK,
        "MemberService.listener",
        "elif isinstance(event, FirstToken):",
        "elif False:",
    ),
    Mutant(
        "words of one epoch are another's",
        DESK,
        "MemberService.listener",
        "request_id=taken.request_id, epoch=taken.epoch)",
        "request_id=taken.request_id)",
    ),
    Mutant("assignments are not counted", DESK, "MemberService.receive", "gateway.num_received += 1", ""),
    Mutant(
        "a farewell is not waited for",
        DESK,
        "MemberService.send_goodbye",
        "self._unacknowledged = set(self._gateways)",
        "",
    ),
    Mutant(
        "load is old news",
        DESK,
        "MemberService.listener",
        "is_due = self._num_uncomputed != gateway.num_reported_tokens or",
        "is_due =",
    ),
]
