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
        "a router's name does not say what came before", NAMES, "names_of", 'name.to_bytes(NAME_BYTES, "big") + packed', "packed"
    ),
    Mutant("a router shares blocks between tenants", NAMES, "root_name", "(model, adapter, cache_group)]", "(model, adapter)]"),
    Mutant("a router's root runs its fields together", NAMES, "root_name", 'len(field).to_bytes(8, "little") + field', "field"),
    Mutant("a router's partial block has a name", NAMES, "names_of", "tokens[: len(tokens) // block_size * block_size]", "tokens"),
    Mutant("a grown request is named from the root", NAMES, "more_names", "names[-1] if names else root", "root"),
    # -- the index --
    Mutant("who left is still read", INDEX, "BlockIndex._drop_bit", "self._masks = {}\ndel self", "del self"),
    Mutant(
        "a bit is another's before it is swept",
        INDEX,
        "BlockIndex._drop_bit", "self._dead |= holder.bit", "self._free_bits.append(holder.bit)",
    ),
    Mutant("a swept bit is never used again", INDEX, "BlockIndex._sweep_bits", "self._free_bits += _bits_of(dead)", ""),
    Mutant(
        "sweeping takes from those who stay",
        INDEX,
        "_without", "held & ~bits if held & bits else held", "0 if held & bits else held",
    ),
    Mutant(
        "beliefs are not swept",
        INDEX,
        "BlockIndex._sweep_bits", "for shards in (self._confirmed, self._expected):", "for shards in (self._confirmed,):",
    ),
    Mutant("a sweep goes on to the end", INDEX, "BlockIndex._sweep_bits", "while self._sweeping and budget > 0:", "while self._sweeping:"),
    Mutant(
        "the second holder replaces the first",
        INDEX,
        "BlockIndex.stored", "this member alone.\nshard[name] = bit if held is None else held | bit", "this member alone.\nshard[name] = bit",
    ),
    Mutant(
        "removed for one is removed for all", INDEX, "_unset", "shard[name] = held ^ bit", "del shard[name]"
    ),
    Mutant(
        "what was removed is believed on",
        INDEX,
        "BlockIndex.removed", "_unset(shards[name & shard_mask], name, bit)\nif name in unconfirmed:", "_unset(shards[name & shard_mask], name, bit)\nif False:",
    ),
    Mutant(
        "a clear leaves beliefs",
        INDEX,
        "BlockIndex.cleared", "holder.unconfirmed.clear()\nif holder.has_bits_set:", "if holder.has_bits_set:",
    ),
    Mutant(
        "a clear leaves entries",
        INDEX,
        "BlockIndex.cleared", "holder.bit, holder.has_bits_set = self._take_bit(member), False", "self._take_bit(member)",
    ),
    Mutant("beliefs do not end", INDEX, "BlockIndex._take_back", "holder.unconfirmed[name] <= now_s:", "False:"),
    Mutant(
        "what was believed anew ends with the first time", INDEX, "BlockIndex._take_back", "and holder.unconfirmed[name] <= now_s:", "and True:"
    ),
    Mutant("beliefs are taken back roots first", INDEX, "BlockIndex._take_back", "reversed(names[-budget:])", "names[:budget]"),
    Mutant(
        "what another brings is withdrawn too",
        INDEX,
        "BlockIndex.withdraw", "if holder.unconfirmed.get(name) == at_s + UNCONFIRMED_S:", "if name in holder.unconfirmed:",
    ),
    Mutant(
        "the search forgets who parts",
        INDEX,
        "BlockIndex._search_marks", "open_groups.append((group ^ held, low, middle - 1))", "",
    ),
    Mutant(
        "the search stops one short",
        INDEX,
        "BlockIndex._deepest", "group, low = held, middle", "group, low = held, middle - 1\nhigh -= 1",
    ),
    Mutant("who holds enough is not asked", INDEX, "BlockIndex._reaches", "if depth > len(names):\nreturn False", "return False"),
    Mutant(
        "what is believed is not looked at before a search ends",
        INDEX,
        "BlockIndex._reaches", "if self._expected[at].get(name, 0) & group:\nreturn True", "if False:\n    return True",
    ),
    Mutant(
        "what is confirmed is not looked at before a search ends",
        INDEX,
        "BlockIndex._reaches", "return depth < bound and bool(self._confirmed[at].get(name, 0) & group)", "return False",
    ),
    Mutant(
        "nobody else is thought to hold what the deepest group held first",
        INDEX,
        "BlockIndex._deepest", "bound = middle", "bound = 1",
    ),
    Mutant(
        "beliefs hide what is confirmed",
        INDEX,
        "BlockIndex.visit", "group ^= expecting", "group = 0",
    ),
    Mutant("marks lie too deep", INDEX, "BlockIndex._search_marks", "found.append((marks[low], group))", "found.append((marks[low] + 1, group))"),
    Mutant(
        "a bit goes by the name of its last member",
        INDEX,
        "BlockIndex._take_bit", "self._groups, self._masks = {}, {}", "self._masks = {}",
    ),
    # -- loads --
    Mutant(
        "what a report counts is counted twice", LOAD, "MemberLoads.report", "if made_s >= as_of_s:", "if True:"
    ),
    Mutant(
        "what was made since a report is forgotten",
        LOAD,
        "MemberLoads.report", "if made_s >= as_of_s:", "if False:",
    ),
    Mutant("an overtaken report counts", LOAD, "MemberLoads.report", "or (load.as_of_s is not None and as_of_s < load.as_of_s)", ""),
    Mutant("a release gives nothing back", LOAD, "MemberLoads.release", "self.in_flight_tokens[member] -= num_tokens", ""),
    Mutant(
        "reservations outlive their member",
        LOAD,
        "MemberLoads.leave", "del self._member_of[request_id]", "pass",
    ),
    # -- membership --
    Mutant(
        "who comes back has the epoch of before",
        MEMBERSHIP,
        "Membership.join", "self._last_epoch += 1", "self._last_epoch = 1",
    ),
    Mutant(
        "a suspect stays suspect", MEMBERSHIP, "Membership.beat", "if record.state is MemberState.SUSPECT else None", "if False else None"
    ),
    Mutant(
        "a suspect gets work",
        MEMBERSHIP,
        "Membership._move", "self.ready_members.pop(assignment.member, None)", "pass",
    ),
    Mutant(
        "a draining member never leaves",
        MEMBERSHIP,
        "Membership._leave_if_done", "is MemberState.DRAINING and not record.num_open", "is MemberState.DRAINING and False",
    ),
    Mutant(
        "a draining member leaves in the middle",
        MEMBERSHIP,
        "Membership._leave_if_done", "is MemberState.DRAINING and not record.num_open", "is MemberState.DRAINING",
    ),
    Mutant(
        "a silent member drains for ever",
        MEMBERSHIP,
        "Membership.advance", "if is_over or record.state is MemberState.DRAINING:", "if is_over:",
    ),
    Mutant(
        "an old epoch ends new requests",
        MEMBERSHIP,
        "Membership.is_current", "record is not None and record.assignment == assignment", "record is not None",
    ),
    Mutant(
        "an old beat makes a member older",
        MEMBERSHIP,
        "Membership.beat", "= max(record.last_beat_s, now_s)\nreturn self._move(record, MemberState.READY) if", "= now_s\nreturn self._move(record, MemberState.READY) if",
    ),
    # -- the choice --
    Mutant("all of a prompt may be cached", CHOICE, "Router._sizes", "[: hit_cap(prompt.num_tokens, size)]", "[:]"),
    Mutant("the longest match is everything", CHOICE, "Router._best_of_group", "return base + least, least, when", "return base, least, when"),
    Mutant("a choice reserves nothing", CHOICE, "Router.choose", "prompt.num_tokens - best.num_cached_tokens, now_s)", "0, now_s)"),
    Mutant(
        "a choice reserves cached tokens too",
        CHOICE,
        "Router.choose", "prompt.num_tokens - best.num_cached_tokens, now_s)", "prompt.num_tokens, now_s)",
    ),
    Mutant("a choice leaves no belief", CHOICE, "Router.choose", "self.index.optimistic(member, names, now_s)", ""),
    Mutant(
        "equal members are taken by name alone", CHOICE, "Router.choose", "self._last_chosen[member] = self._num_choices", ""
    ),
    Mutant(
        "block sizes are compared in blocks",
        CHOICE,
        "Router.best.look", "(num_tokens - size * depth), size * depth", "(num_tokens - depth), depth",
    ),
    Mutant("who is excluded is chosen", CHOICE, "Router._sizes", ".difference(exclude)", ""),
    Mutant("who moves stays believed", CHOICE, "Router.moved", "self.index.withdraw(", "(lambda *_: None)("),
    Mutant("who moves takes its computed blocks along", CHOICE, "Router.computed", "routed.unconfirmed = ()", ""),
    Mutant("who is gone stays in the index", CHOICE, "Router._followed", "self.index.leave(one.member)", ""),
    Mutant("time passes and nothing is swept", CHOICE, "Router.advance", "self.index.sweep(now_s)", ""),
    # -- what members say they hold --
    Mutant("blocks of another medium count", BATCHES, "_counts", "(event.medium or MEDIUM).upper() == MEDIUM and", ""),
    Mutant("blocks of another group of layers count", BATCHES, "_counts", "and not event.group_idx", ""),
    Mutant(
        "blocks with images are named by their tokens", BATCHES, "_num_plain", "return at", "continue"
    ),
    Mutant("a salt in the extra keys is not read", BATCHES, "_group_of", 'if not others:\nreturn ""', 'return ""'),
    Mutant("an adapter is not read", BATCHES, "_stored", "adapter = event.lora_name or", "adapter ="),
    Mutant(
        "a gap is passed over",
        READER,
        "EventReader._take_batch", "not self._has_base or number > self.next_number:", "not self._has_base:",
    ),
    Mutant(
        "what was held back is forgotten",
        READER,
        "EventReader._has_next", "return self._has_base and self.next_number in self._held", "return False",
    ),
    Mutant("a batch is applied twice", READER, "EventReader._take_batch", "return  # received before", "pass"),
    Mutant(
        "a new life keeps the blocks of the former",
        READER,
        "EventReader._begin_anew", "self._forget()\nself.num_incarnations", "self.num_incarnations",
    ),
    Mutant(
        "a lost last batch is not missed",
        READER,
        "EventReader.want", "bool(self._held) or self._published_number > self.next_number", "bool(self._held)",
    ),
    Mutant(
        "a replay that is too short is asked for again for ever",
        READER,
        "EventReader.replay_ended", "self._has_base = False", "pass",
    ),
    Mutant(
        "a snapshot is added to what was believed before",
        READER,
        "EventReader._take_piece", "self._forget()\nself._piece = (", "self._piece = (",
    ),
    Mutant(
        "a snapshot with a missing piece is taken", READER, "EventReader._take_own", "self._piece == (answer.number, answer.num_pieces)", "True"
    ),
    Mutant(
        "what came during a snapshot is not applied",
        READER,
        "EventReader._based_at", "for past in [at for at in self._held if at < number]:", "for past in [*self._held]:",
    ),
    Mutant(
        "a removed block stays known",
        READER,
        "EventReader._applied", "self._names_by_hash.pop(one) for one", "self._names_by_hash[one] for one",
    ),
    Mutant(
        "a child without a parent begins a prompt",
        READER,
        "EventReader._stored", "before = self._names_by_hash.get(run.parent)", "before = self._names_by_hash.get(run.parent, 0)",
    ),
]
