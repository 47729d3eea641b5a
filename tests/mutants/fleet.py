"""Bugs of the router: names, the index, loads, membership, the choice, and what members say they hold."""

from tests.mutants.kill import Mutant

TESTS = (
    *(f"tests/unit/fleet/test_{name}.py" for name in ("names", "index", "load", "membership", "choice")),
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
        "a router's name does not say what came before", NAMES, 'name.to_bytes(NAME_BYTES, "big") + packed', "packed"
    ),
    Mutant("a router shares blocks between tenants", NAMES, "(model, adapter, cache_group)]", "(model, adapter)]"),
    Mutant("a router's root runs its fields together", NAMES, 'len(field).to_bytes(8, "little") + field', "field"),
    Mutant("a router's partial block has a name", NAMES, "tokens[: len(tokens) // block_size * block_size]", "tokens"),
    Mutant("a grown request is named from the root", NAMES, "names[-1] if names else root", "root"),
    # -- the index --
    Mutant("who left is still read", INDEX, "        self._masks = {}\n        del self", "        del self"),
    Mutant(
        "a bit is another's before it is swept",
        INDEX,
        "            self._dead |= holder.bit\n",
        "            self._free_bits.append(holder.bit)\n",
    ),
    Mutant("a swept bit is never used again", INDEX, "                self._free_bits += _bits_of(dead)\n", ""),
    Mutant(
        "sweeping takes from those who stay",
        INDEX,
        "held & ~bits if held & bits else held",
        "0 if held & bits else held",
    ),
    Mutant(
        "beliefs are not swept",
        INDEX,
        "for shards in (self._confirmed, self._expected):",
        "for shards in (self._confirmed,):",
    ),
    Mutant("a sweep goes on to the end", INDEX, "while self._sweeping and budget > 0:", "while self._sweeping:"),
    Mutant(
        "the second holder replaces the first",
        INDEX,
        "this member alone.\n            shard[name] = bit if held is None else held | bit\n",
        "this member alone.\n            shard[name] = bit\n",
    ),
    Mutant(
        "removed for one is removed for all", INDEX, "        shard[name] = held ^ bit\n", "        del shard[name]\n"
    ),
    Mutant(
        "what was removed is believed on",
        INDEX,
        "            _unset(shards[name & shard_mask], name, bit)\n            if name in unconfirmed:\n",
        "            _unset(shards[name & shard_mask], name, bit)\n            if False:\n",
    ),
    Mutant(
        "a clear leaves beliefs",
        INDEX,
        "        holder.unconfirmed.clear()\n        if holder.has_bits_set:\n",
        "        if holder.has_bits_set:\n",
    ),
    Mutant(
        "a clear leaves entries",
        INDEX,
        "holder.bit, holder.has_bits_set = self._take_bit(member), False",
        "self._take_bit(member)",
    ),
    Mutant("beliefs do not end", INDEX, "holder.unconfirmed[name] <= now_s:", "False:"),
    Mutant(
        "what was believed anew ends with the first time", INDEX, "and holder.unconfirmed[name] <= now_s:", "and True:"
    ),
    Mutant("beliefs are taken back roots first", INDEX, "reversed(names[-budget:])", "names[:budget]"),
    Mutant(
        "what another brings is withdrawn too",
        INDEX,
        "if holder.unconfirmed.get(name) == at_s + UNCONFIRMED_S:",
        "if name in holder.unconfirmed:",
    ),
    Mutant(
        "the search forgets who parts",
        INDEX,
        "                    open_groups.append((group ^ held, low, middle - 1))\n",
        "",
    ),
    Mutant(
        "the search stops one short",
        INDEX,
        "                group, low = held, middle\n",
        "                group, low = held, middle - 1\n                high -= 1\n",
    ),
    Mutant("who holds enough is not asked", INDEX, "if depth > len(names):\n            return False", "return False"),
    Mutant(
        "what is believed is not looked at before a search ends",
        INDEX,
        "if self._expected[at].get(name, 0) & group:\n            return True\n",
        "if False:\n            return True\n",
    ),
    Mutant(
        "what is confirmed is not looked at before a search ends",
        INDEX,
        "return depth < bound and bool(self._confirmed[at].get(name, 0) & group)",
        "return False",
    ),
    Mutant(
        "nobody else is thought to hold what the deepest group held first",
        INDEX,
        "                    bound = middle\n",
        "                    bound = 1\n",
    ),
    Mutant(
        "beliefs hide what is confirmed",
        INDEX,
        "                group ^= expecting\n",
        "                group = 0\n",
    ),
    Mutant("marks lie too deep", INDEX, "found.append((marks[low], group))", "found.append((marks[low] + 1, group))"),
    Mutant(
        "a bit goes by the name of its last member",
        INDEX,
        "        self._groups, self._masks = {}, {}\n",
        "        self._masks = {}\n",
    ),
    # -- loads --
    Mutant(
        "what a report counts is counted twice", LOAD, "            if made_s >= as_of_s:\n", "            if True:\n"
    ),
    Mutant(
        "what was made since a report is forgotten",
        LOAD,
        "            if made_s >= as_of_s:\n",
        "            if False:\n",
    ),
    Mutant("an overtaken report counts", LOAD, " or (load.as_of_s is not None and as_of_s < load.as_of_s)", ""),
    Mutant("a release gives nothing back", LOAD, "            self.in_flight_tokens[member] -= num_tokens\n", ""),
    Mutant(
        "reservations outlive their member",
        LOAD,
        "            del self._member_of[request_id]\n        del self.in_f",
        "            pass\n        del self.in_f",
    ),
    # -- membership --
    Mutant(
        "who comes back has the epoch of before",
        MEMBERSHIP,
        "        self._last_epoch += 1\n",
        "        self._last_epoch = 1\n",
    ),
    Mutant(
        "a suspect stays suspect", MEMBERSHIP, "if record.state is MemberState.SUSPECT else None", "if False else None"
    ),
    Mutant(
        "a suspect gets work",
        MEMBERSHIP,
        "            self.ready_members.pop(assignment.member, None)\n",
        "            pass\n",
    ),
    Mutant(
        "a draining member never leaves",
        MEMBERSHIP,
        "is MemberState.DRAINING and not record.num_open",
        "is MemberState.DRAINING and False",
    ),
    Mutant(
        "a draining member leaves in the middle",
        MEMBERSHIP,
        "is MemberState.DRAINING and not record.num_open",
        "is MemberState.DRAINING",
    ),
    Mutant(
        "a silent member drains for ever",
        MEMBERSHIP,
        "if is_over or record.state is MemberState.DRAINING:",
        "if is_over:",
    ),
    Mutant(
        "an old epoch ends new requests",
        MEMBERSHIP,
        "record is not None and record.assignment == assignment",
        "record is not None",
    ),
    Mutant(
        "an old beat makes a member older",
        MEMBERSHIP,
        "= max(record.last_beat_s, now_s)\n        return self._move(record, MemberState.READY) if",
        "= now_s\n        return self._move(record, MemberState.READY) if",
    ),
    # -- the choice --
    Mutant("all of a prompt may be cached", CHOICE, "[: hit_cap(prompt.num_tokens, size)]", "[:]"),
    Mutant("the longest match is everything", CHOICE, "return base + least, least, when", "return base, least, when"),
    Mutant("a choice reserves nothing", CHOICE, "prompt.num_tokens - best.num_cached_tokens, now_s)", "0, now_s)"),
    Mutant(
        "a choice reserves cached tokens too",
        CHOICE,
        "prompt.num_tokens - best.num_cached_tokens, now_s)",
        "prompt.num_tokens, now_s)",
    ),
    Mutant("a choice leaves no belief", CHOICE, "        self.index.optimistic(member, names, now_s)\n", ""),
    Mutant(
        "equal members are taken by name alone", CHOICE, "        self._last_chosen[member] = self._num_choices\n", ""
    ),
    Mutant(
        "block sizes are compared in blocks",
        CHOICE,
        "(num_tokens - size * depth), size * depth",
        "(num_tokens - depth), depth",
    ),
    Mutant("who is excluded is chosen", CHOICE, ".difference(exclude)", ""),
    Mutant("who moves stays believed", CHOICE, "            self.index.withdraw(", "            (lambda *_: None)("),
    Mutant("who moves takes its computed blocks along", CHOICE, "            routed.unconfirmed = ()\n", ""),
    Mutant("who is gone stays in the index", CHOICE, "                self.index.leave(one.member)\n", ""),
    Mutant("time passes and nothing is swept", CHOICE, "        self.index.sweep(now_s)\n", ""),
    # -- what members say they hold --
    Mutant("blocks of another medium count", BATCHES, "(event.medium or MEDIUM).upper() == MEDIUM and ", ""),
    Mutant("blocks of another group of layers count", BATCHES, " and not event.group_idx", ""),
    Mutant(
        "blocks with images are named by their tokens", BATCHES, "            return at\n", "            continue\n"
    ),
    Mutant("a salt in the extra keys is not read", BATCHES, '    if not others:\n        return ""', '    return ""'),
    Mutant("an adapter is not read", BATCHES, "adapter = event.lora_name or", "adapter = "),
    Mutant(
        "a gap is passed over",
        READER,
        "not self._has_base or number > self.next_number:",
        "not self._has_base:",
    ),
    Mutant(
        "what was held back is forgotten",
        READER,
        "return self._has_base and self.next_number in self._held",
        "return False",
    ),
    Mutant("a batch is applied twice", READER, "            return  # received before\n", "            pass\n"),
    Mutant(
        "a new life keeps the blocks of the former",
        READER,
        "        self._forget()\n        self.num_incarnations",
        "        self.num_incarnations",
    ),
    Mutant(
        "a lost last batch is not missed",
        READER,
        "bool(self._held) or self._published_number > self.next_number",
        "bool(self._held)",
    ),
    Mutant(
        "a replay that is too short is asked for again for ever",
        READER,
        "            self._has_base = False\n        else",
        "            pass\n        else",
    ),
    Mutant(
        "a snapshot is added to what was believed before",
        READER,
        "            self._forget()\n            self._piece = (",
        "            self._piece = (",
    ),
    Mutant(
        "a snapshot with a missing piece is taken", READER, "self._piece == (answer.number, answer.num_pieces)", "True"
    ),
    Mutant(
        "what came during a snapshot is not applied",
        READER,
        "for past in [at for at in self._held if at < number]:",
        "for past in [*self._held]:",
    ),
    Mutant(
        "a removed block stays known",
        READER,
        "self._names_by_hash.pop(one) for one",
        "self._names_by_hash[one] for one",
    ),
    Mutant(
        "a child without a parent begins a prompt",
        READER,
        "before = self._names_by_hash.get(run.parent)",
        "before = self._names_by_hash.get(run.parent, 0)",
    ),
]
