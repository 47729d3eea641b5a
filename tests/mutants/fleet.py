"""Bugs of the router: names, the index, loads, membership, the choice, and what members say they hold."""

from tests.mutants.kill import Mutant

TESTS = (
    *(
        f"tests/unit/fleet/routing/test_{name}.py"
        for name in ("block_names", "block_index", "member_load", "membership", "router")
    ),
    *("tests/unit/fleet/kv_events/test_reader.py", "tests/property/test_fleet.py"),
)

NAMES = "fleet/routing/block_names.py"
INDEX = "fleet/routing/block_index.py"
LOAD = "fleet/routing/member_load.py"
MEMBERSHIP = "fleet/routing/membership.py"
CHOICE = "fleet/routing/router.py"

BATCHES = "fleet/kv_events/batches.py"
READER = "fleet/kv_events/reader.py"

MUTANTS = [
    # -- names --
    Mutant(
        "a router's name does not say what came before",
        NAMES,
        "names_of",
        'name.to_bytes(NAME_BYTES, "big") + packed',
        "packed",
    ),
    Mutant(
        "a router shares blocks between tenants",
        NAMES,
        "root_name",
        "(model, adapter, cache_group)]",
        "(model, adapter)]",
    ),
    Mutant(
        "a router's root runs its fields together",
        NAMES,
        "root_name",
        'len(field).to_bytes(8, "little") + field',
        "field",
    ),
    Mutant(
        "a router's partial block has a name",
        NAMES,
        "names_of",
        "tokens[: len(tokens) // block_size * block_size]",
        "tokens",
    ),
    # -- the index --
    Mutant("who left is still read", INDEX, "BlockIndex._drop_bit", "self.masks = {}\ndel self", "del self"),
    Mutant(
        "a bit is another's before it is swept",
        INDEX,
        "BlockIndex._drop_bit",
        "self.dead_bits |= holder.bit",
        "self.free_bits.append(holder.bit)",
    ),
    Mutant("a swept bit is never used again", INDEX, "BlockIndex._sweep_bits", "self.free_bits += _bits_of(dead)", ""),
    Mutant(
        "sweeping takes from those who stay",
        INDEX,
        "_clear_bits",
        "mask & ~bits if mask & bits else mask",
        "0 if mask & bits else mask",
    ),
    Mutant(
        "beliefs are not swept",
        INDEX,
        "BlockIndex._sweep_bits",
        "for shards in (self.confirmed, self.expected):",
        "for shards in (self.confirmed,):",
    ),
    Mutant(
        "a sweep goes on to the end",
        INDEX,
        "BlockIndex._sweep_bits",
        "while self.sweeping_bits and budget > 0:",
        "while self.sweeping_bits:",
    ),
    Mutant(
        "the second holder replaces the first",
        INDEX,
        "BlockIndex.add_blocks",
        "one integer object.\nshard[name] = bit if mask is None else mask | bit",
        "one integer object.\nshard[name] = bit",
    ),
    Mutant("removed for one is removed for all", INDEX, "_clear_bit", "shard[name] = mask ^ bit", "del shard[name]"),
    Mutant(
        "what was removed is believed on",
        INDEX,
        "BlockIndex.remove_blocks",
        "_clear_bit(shards[name & shard_mask], name, bit)\nif name in unconfirmed:",
        "_clear_bit(shards[name & shard_mask], name, bit)\nif False:",
    ),
    Mutant(
        "a clear leaves beliefs",
        INDEX,
        "BlockIndex.clear_blocks",
        "holder.unconfirmed.clear()\nif holder.has_bits_set:",
        "if holder.has_bits_set:",
    ),
    Mutant(
        "a clear leaves entries",
        INDEX,
        "BlockIndex.clear_blocks",
        "holder.bit, holder.has_bits_set = self._assign_bit(member), False",
        "self._assign_bit(member)",
    ),
    Mutant("beliefs do not end", INDEX, "BlockIndex._drop_overdue", "holder.unconfirmed[name] <= now_s:", "False:"),
    Mutant(
        "what was believed anew ends with the first time",
        INDEX,
        "BlockIndex._drop_overdue",
        "and holder.unconfirmed[name] <= now_s:",
        "and True:",
    ),
    Mutant(
        "beliefs are taken back roots first",
        INDEX,
        "BlockIndex._drop_overdue",
        "reversed(names[-budget:])",
        "names[:budget]",
    ),
    Mutant(
        "what another brings is withdrawn too",
        INDEX,
        "BlockIndex.withdraw_expected",
        "if holder.unconfirmed.get(name) == at_s + UNCONFIRMED_S:",
        "if name in holder.unconfirmed:",
    ),
    Mutant(
        "the search forgets who parts",
        INDEX,
        "BlockIndex._search_marks",
        "open_groups.append((group ^ subgroup, low, middle - 1))",
        "",
    ),
    Mutant(
        "the search stops one short",
        INDEX,
        "BlockIndex._deepest_group",
        "group, low = subgroup, middle",
        "group, low = subgroup, middle - 1\nhigh -= 1",
    ),
    Mutant(
        "who holds enough is not asked",
        INDEX,
        "BlockIndex._may_reach",
        "if depth > len(names):\nreturn False",
        "return False",
    ),
    Mutant(
        "what is believed is not looked at before a search ends",
        INDEX,
        "BlockIndex._may_reach",
        "if self.expected[shard].get(name, 0) & group:\nreturn True",
        "if False:\n    return True",
    ),
    Mutant(
        "what is confirmed is not looked at before a search ends",
        INDEX,
        "BlockIndex._may_reach",
        "return depth < bound and bool(self.confirmed[shard].get(name, 0) & group)",
        "return False",
    ),
    Mutant(
        "nobody else is thought to hold what the deepest group held first",
        INDEX,
        "BlockIndex._deepest_group",
        "bound = middle",
        "bound = 1",
    ),
    Mutant(
        "beliefs hide what is confirmed",
        INDEX,
        "BlockIndex.visit",
        "group ^= expected_mask",
        "group = 0",
    ),
    Mutant(
        "marks lie too deep",
        INDEX,
        "BlockIndex._search_marks",
        "results.append((marks[low], group))",
        "results.append((marks[low] + 1, group))",
    ),
    Mutant(
        "a bit goes by the name of its last member",
        INDEX,
        "BlockIndex._assign_bit",
        "self._groups, self.masks = {}, {}",
        "self.masks = {}",
    ),
    # -- loads --
    Mutant(
        "what a report counts is counted twice", LOAD, "MemberLoads.report", "if reserved_s >= as_of_s:", "if True:"
    ),
    Mutant(
        "what was made since a report is forgotten",
        LOAD,
        "MemberLoads.report",
        "if reserved_s >= as_of_s:",
        "if False:",
    ),
    Mutant(
        "an overtaken report counts",
        LOAD,
        "MemberLoads.report",
        "or (load.as_of_s is not None and as_of_s < load.as_of_s)",
        "",
    ),
    Mutant(
        "a release gives nothing back", LOAD, "MemberLoads.release", "self.in_flight_tokens[member] -= num_tokens", ""
    ),
    Mutant(
        "reservations outlive their member",
        LOAD,
        "MemberLoads.leave",
        "del self.member_of[request_id]",
        "pass",
    ),
    # -- membership --
    Mutant(
        "who comes back has the epoch of before",
        MEMBERSHIP,
        "Membership.join",
        "self.last_epoch += 1",
        "self.last_epoch = 1",
    ),
    Mutant(
        "a suspect stays suspect",
        MEMBERSHIP,
        "Membership.record_heartbeat",
        "if record.state is MemberState.SUSPECT else None",
        "if False else None",
    ),
    Mutant(
        "a suspect gets work",
        MEMBERSHIP,
        "Membership._set_state",
        "self.ready_members.pop(assignment.member, None)",
        "pass",
    ),
    Mutant(
        "a draining member never leaves",
        MEMBERSHIP,
        "Membership._remove_if_drained",
        "is MemberState.DRAINING and not record.num_open",
        "is MemberState.DRAINING and False",
    ),
    Mutant(
        "a draining member leaves in the middle",
        MEMBERSHIP,
        "Membership._remove_if_drained",
        "is MemberState.DRAINING and not record.num_open",
        "is MemberState.DRAINING",
    ),
    Mutant(
        "a silent member drains for ever",
        MEMBERSHIP,
        "Membership.advance",
        "if is_gone or record.state is MemberState.DRAINING:",
        "if is_gone:",
    ),
    Mutant(
        "an old epoch ends new requests",
        MEMBERSHIP,
        "Membership.is_current",
        "record is not None and record.assignment == assignment",
        "record is not None",
    ),
    Mutant(
        "an old beat makes a member older",
        MEMBERSHIP,
        "Membership.record_heartbeat",
        "= max(record.last_heartbeat_s, now_s)\nreturn self._set_state(record, MemberState.READY) if",
        "= now_s\nreturn self._set_state(record, MemberState.READY) if",
    ),
    # -- the choice --
    Mutant(
        "all of a prompt may be cached",
        CHOICE,
        "Router._candidates",
        "[: max_hit_blocks(prompt.num_tokens, size)]",
        "[:]",
    ),
    Mutant(
        "the longest match is everything",
        CHOICE,
        "Router._best_of_group",
        "return base + min_tokens, min_tokens, turn",
        "return base, min_tokens, turn",
    ),
    Mutant(
        "a choice reserves nothing",
        CHOICE,
        "Router.assign",
        "prompt.num_tokens - choice.num_cached_tokens, now_s)",
        "0, now_s)",
    ),
    Mutant(
        "a choice reserves cached tokens too",
        CHOICE,
        "Router.assign",
        "prompt.num_tokens - choice.num_cached_tokens, now_s)",
        "prompt.num_tokens, now_s)",
    ),
    Mutant("a choice leaves no belief", CHOICE, "Router.assign", "self.index.expect_blocks(member, names, now_s)", ""),
    Mutant(
        "equal members are taken by name alone",
        CHOICE,
        "Router.assign",
        "self.last_chosen[member] = self._num_choices",
        "",
    ),
    Mutant(
        "block sizes are compared in blocks",
        CHOICE,
        "Router.best.offer_group",
        "(num_tokens - size * depth), size * depth",
        "(num_tokens - depth), depth",
    ),
    Mutant("who is excluded is chosen", CHOICE, "Router._candidates", ".difference(exclude)", ""),
    Mutant(
        "who moves stays believed", CHOICE, "Router.unassign", "self.index.withdraw_expected(", "(lambda *_: None)("
    ),
    Mutant("who moves takes its computed blocks along", CHOICE, "Router.mark_computed", "routed.unconfirmed = ()", ""),
    Mutant(
        "who is gone stays in the index", CHOICE, "Router._apply_transitions", "self.index.leave(change.member)", ""
    ),
    Mutant("time passes and nothing is swept", CHOICE, "Router.advance", "self.index.sweep(now_s)", ""),
    # -- what members say they hold --
    Mutant(
        "blocks of another medium count", BATCHES, "_is_relevant", "(event.medium or MEDIUM).upper() == MEDIUM and", ""
    ),
    Mutant("blocks of another group of layers count", BATCHES, "_is_relevant", "and not event.group_idx", ""),
    Mutant("blocks with images are named by their tokens", BATCHES, "_num_text_blocks", "return index", "continue"),
    Mutant(
        "a salt in the extra keys is not read", BATCHES, "_cache_group_of", 'if not other_keys:\nreturn ""', 'return ""'
    ),
    Mutant("an adapter is not read", BATCHES, "_stored_run", "adapter = event.lora_name or", "adapter ="),
    Mutant(
        "a gap is passed over",
        READER,
        "EventReader._take_batch",
        "not self._has_base or number > self.next_number:",
        "not self._has_base:",
    ),
    Mutant(
        "what was held back is forgotten",
        READER,
        "EventReader._has_next",
        "return self._has_base and self.next_number in self._held_batches",
        "return False",
    ),
    Mutant("a batch is applied twice", READER, "EventReader._take_batch", "return  # received before", "pass"),
    Mutant(
        "a new life keeps the blocks of the former",
        READER,
        "EventReader._start_incarnation",
        "self._forget()\nself.num_incarnations",
        "self.num_incarnations",
    ),
    Mutant(
        "a lost last batch is not missed",
        READER,
        "EventReader.missing",
        "bool(self._held_batches) or self._published_number > self.next_number",
        "bool(self._held_batches)",
    ),
    Mutant(
        "a replay that is too short is asked for again for ever",
        READER,
        "EventReader.end_replay",
        "self._has_base = False",
        "pass",
    ),
    Mutant(
        "a snapshot is added to what was believed before",
        READER,
        "EventReader._take_piece",
        "self._forget()\nself._piece = (",
        "self._piece = (",
    ),
    Mutant(
        "a snapshot with a missing piece is taken",
        READER,
        "EventReader._take_quire_response",
        "self._piece == (response.number, response.num_pieces)",
        "True",
    ),
    Mutant(
        "what came during a snapshot is not applied",
        READER,
        "EventReader._set_base",
        "for old_number in [held_number for held_number in self._held_batches if held_number < number]:",
        "for old_number in [*self._held_batches]:",
    ),
    Mutant(
        "a removed block stays known",
        READER,
        "EventReader._apply",
        "self._names_by_hash.pop(digest) for digest",
        "self._names_by_hash[digest] for digest",
    ),
    Mutant(
        "a child without a parent begins a prompt",
        READER,
        "EventReader._apply_stored",
        "parent_name = self._names_by_hash.get(run.parent)",
        "parent_name = self._names_by_hash.get(run.parent, 0)",
    ),
]
