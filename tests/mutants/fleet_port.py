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
        "who is ready gets nobody that waited",
        PORT,
        "FleetPort._apply_transitions",
        "transition.new_state is MemberState.READY",
        "False",
    ),
    Mutant("who was turned away is not tried again", PORT, "FleetPort._place_held", "flight.refusals.clear()", ""),
    # -- moves --
    Mutant(
        "who is gone keeps its requests", PORT, "FleetPort._apply_transitions", "self._move_all(transition.member)", ""
    ),
    Mutant("who is given up keeps its link", PORT, "FleetPort._apply_transitions", "record.link.end(reason)", ""),
    Mutant(
        "another link's end is this one's",
        PORT,
        "FleetPort.handle_loss",
        "record is not None and record.link is link",
        "record is not None",
    ),
    Mutant(
        "a question outlives whom it was asked",
        PORT,
        "FleetPort._apply_transitions",
        "record.calls.fail_all(EngineDeadError(",
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
        "FleetPort._namespace_of",
        "card.info.identity.fingerprint)",
        "card.model)",
    ),
    # -- refusals --
    Mutant(
        "who has begun is sent away",
        PORT,
        "FleetPort._take_refusal",
        "if is_final and not flight.has_begun:",
        "if is_final:",
    ),
    Mutant(
        "one refusal is enough",
        PORT,
        "FleetPort._take_refusal",
        "len(flight.refusals) > MAX_NEXT_MEMBERS",
        "len(flight.refusals) > 0",
    ),
    Mutant(
        "all members are asked",
        PORT,
        "FleetPort._take_refusal",
        "is_final = len(flight.refusals) > MAX_NEXT_MEMBERS or",
        "is_final =",
    ),
    Mutant(
        "whoever is wrong is sent on",
        PORT,
        "FleetPort._take_refusal",
        "or not isinstance(error, FULL_ERRORS + LEAVING_ERRORS)",
        "",
    ),
    Mutant("the longest wait is told", REQUEST, "FleetRequest.best_refusal", "best = min(full", "best = max(full"),
    Mutant("who waited is a suspect", REQUEST, "FleetRequest.take_back", "entry.num_strikes = num_strikes", "pass"),
    Mutant("nobody is ever a suspect", REQUEST, "FleetRequest.take_back", "if was_running else []", "if False else []"),
    Mutant(
        "what was answered is not computed before",
        REQUEST,
        "FleetRequest.tokens",
        "open_answers[0].produced if len(open_answers) == 1",
        "() if len(open_answers) == 1",
    ),
    # -- members --
    Mutant(
        "another model is a member",
        MEMBERS,
        "FleetMembers._check_model",
        "info.identity.fingerprint != first.identity.fingerprint",
        "False",
    ),
    Mutant(
        "other tokens are a member's",
        MEMBERS,
        "FleetMembers._check_model",
        "info.vocabulary_size != first.vocabulary_size",
        "False",
    ),
    Mutant("one member is two", MEMBERS, "FleetMembers.welcome", "if link.address in self.by_address:", "if False:"),
    Mutant(
        "heard more than was said",
        MEMBERS,
        "FleetMembers.report",
        "if not 0 <= num_new <= len(record.unacknowledged_s):",
        "if num_new < 0:",
    ),
    Mutant(
        "what is on its way is forgotten",
        MEMBERS,
        "FleetMembers.report",
        "record.unacknowledged_s[0] if record.unacknowledged_s else self._clock()",
        "self._clock()",
    ),
    Mutant(
        "a gateway that slept doubts all", MEMBERS, "FleetMembers.advance", "now_s - last_s > MAX_TICK_GAP_S", "False"
    ),
    Mutant(
        "a suspect is forgiven by a sleep",
        MEMBERS,
        "FleetMembers.advance",
        "is not MemberState.SUSPECT:",
        "is not None:",
    ),
    Mutant(
        "a worker's end is no doubt",
        MEMBERS,
        "FleetMembers.handle_heartbeat",
        "return self.router.mark_suspect(member)",
        "return ()",
    ),
    Mutant(
        "a long prompt goes to a short member",
        MEMBERS,
        "FleetMembers._capable_members",
        "max_sequence_tokens > length",
        "max_sequence_tokens > 0",
    ),
    Mutant(
        "who could be ready soon is not waited for",
        MEMBERS,
        "FleetMembers._may_become_ready",
        "needs_quire or any(map(self._may_be_ready_soon, capable))",
        "needs_quire",
    ),
    Mutant(
        "all bits are equal",
        MEMBERS,
        "FleetMembers.choose",
        "self.by_address[member].exactness != flight.exactness",
        "False",
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
        "exclude = flight.refusals.keys() | incapable",
        "exclude = set(incapable)",
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
        "command.epoch <= previous.epoch",
        "command.epoch < previous.epoch",
    ),
    Mutant(
        "the assignment before runs on",
        DESK,
        "MemberService._assign",
        "self._supervisor.cancel(gateway.local_ids[command.request_id])",
        "pass",
    ),
    Mutant(
        "a member that drains takes new ones",
        DESK,
        "MemberService._validated_namespace",
        "if self.is_draining:",
        "if False:",
    ),
    Mutant(
        "another model's request is taken",
        DESK,
        "MemberService._validated_namespace",
        "if (requested.format_version, requested.model) != (namespace.format_version, namespace.model):",
        "if False:",
    ),
    Mutant("a gateway that is gone still wants", DESK, "MemberService.forget", "self._supervisor.cancel(local_id)", ""),
    Mutant(
        "what was to be computed is for ever",
        DESK,
        "MemberService.forget",
        "self._set_uncomputed(self.assignments.pop(local_id), 0)",
        "self.assignments.pop(local_id)",
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
        "MemberService.on_events",
        "assignment.num_prompt_tokens - event.num_cached_tokens",
        "assignment.num_prompt_tokens",
    ),
    Mutant(
        "a prompt that is computed is to be",
        DESK,
        "MemberService.on_events",
        "elif isinstance(event, FirstToken):",
        "elif False:",
    ),
    Mutant(
        "words of one epoch are another's",
        DESK,
        "MemberService.on_events",
        "request_id=assignment.request_id, epoch=assignment.epoch)",
        "request_id=assignment.request_id)",
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
        "MemberService.on_events",
        "is_due = self._num_uncomputed != gateway.num_reported_tokens or",
        "is_due =",
    ),
]
