"""Bugs of recurrent states: slots, the tables that use them, the borders they are kept at, and what is told of them."""

from tests.mutants.kill import Mutant

TESTS = (
    "tests/unit/core/memory/test_state_slots.py",
    "tests/unit/core/memory/test_table_states.py",
    "tests/unit/core/scheduling/test_state_limits.py",
    "tests/unit/core/scheduling/test_state_checkpoints.py",
    "tests/unit/core/memory/test_kv_publisher.py",
    "tests/unit/core/scheduling/test_hybrid_scheduler.py",
    "tests/unit/engine/test_states.py",
    "tests/property/test_kv_memory.py::test_hits_with_states_equal_those_of_token_tuples_with_exact_queues",
)

SLOTS = "core/memory/state_slots.py"
STATES = "core/memory/table_states.py"
BORDERS = "core/scheduling/state_checkpoints.py"
ANNOUNCER = "core/memory/kv_publisher.py"
NAMES = "core/memory/block_names.py"
MEMORY = "core/memory/kv_memory.py"
TREE = "core/memory/prefix_tree.py"
SCHEDULER = "core/scheduling/scheduler.py"
ROWS = "core/scheduling/rows.py"
ENGINE = "engine/engine.py"

MUTANTS = [
    # -- a sequence's own slot --
    Mutant(
        "slot zero is handed out",
        SLOTS,
        "StateSlots.__init__",
        "range(num_slots, 0, -1)",
        "range(num_slots - 1, -1, -1)",
    ),
    Mutant(
        "a new sequence begins with a stranger's state",
        SLOTS,
        "StateSlots.begin",
        "self._copies.append(SlotCopy(ZERO_SLOT, slot))",
        "",
    ),
    Mutant(
        "a hit brings no state",
        SLOTS,
        "StateSlots.begin_after",
        "self._copies.append(SlotCopy(source, slot))",
        "pass",
    ),
    Mutant("a fork runs in its parent's slot", SLOTS, "StateSlots.fork", "child = self._take()", "child = slot"),
    Mutant("a fork gets no state", SLOTS, "StateSlots.fork", "self._copies.append(SlotCopy(slot, child))", ""),
    Mutant(
        "a fork begins anew", STATES, "TableStates.fork", "self.slots.fork(table.state_slot)", "self.slots.begin(None)"
    ),
    Mutant(
        "copies are made backwards",
        SLOTS,
        "StateSlots.pop_copies",
        "tuple(self._copies), tuple",
        "tuple(self._copies[::-1]), tuple",
    ),
    Mutant(
        "copies are made again and again",
        SLOTS,
        "StateSlots.pop_copies",
        "self._copies, self._cache_copies = [], []",
        "self._cache_copies = []",
    ),
    Mutant("a slot is never given back", STATES, "TableStates.release", "self.slots.give_back(table.state_slot)", ""),
    Mutant(
        "who finds more takes a second slot",
        STATES,
        "TableStates.match",
        "begin_after(table.blocks[-1], table.state_slot)",
        "begin_after(table.blocks[-1], None)",
    ),
    # -- what is kept --
    Mutant(
        "states are kept in slots that others run in",
        SLOTS,
        "StateSlots.reserve",
        "len(self.pinned_slots) >= self._max_fixed:",
        "0 < 0:",
    ),
    Mutant(
        "pins take the slots of those who run",
        SLOTS,
        "StateSlots.reserve",
        "if self.num_reserved + len(self.pinned_slots) >= self._max_fixed:",
        "if self.num_reserved >= self._max_fixed:",
    ),
    Mutant(
        "a state that somebody used is given up",
        SLOTS,
        "StateSlots.reserve",
        "last_cached_block is not None and last_cached_block in self.transients:",
        "last_cached_block is not None and last_cached_block in self.cached_slots:",
    ),
    Mutant(
        "every state on the way stays",
        SLOTS,
        "StateSlots.reserve",
        "if last_cached_block is not None and last_cached_block in self.transients:",
        "if False and last_cached_block is not None:",
    ),
    Mutant(
        "a state that was given up is still passing",
        SLOTS,
        "StateSlots.reserve",
        "self.transients.discard(last_cached_block)",
        "",
    ),
    Mutant(
        "a state is never written",
        SLOTS,
        "StateSlots.reserve",
        "self._cache_copies.append(SlotCopy(running_slot, reserved_slot))",
        "",
    ),
    Mutant(
        "an equal state takes the place of the first",
        SLOTS,
        "StateSlots.attach",
        "if self.slot_of(block) is not None:",
        "if False:",
    ),
    Mutant("a state kept again is not renewed", SLOTS, "StateSlots.attach", "self.use(block)", ""),
    Mutant("what is passing lasts", SLOTS, "StateSlots.attach", "if kind is StateCheckpoint.TRANSIENT:", "if False:"),
    Mutant(
        "sparse states are as good as others",
        SLOTS,
        "StateSlots.attach",
        "move_to_end(block, last=False)",
        "move_to_end(block)",
    ),
    Mutant(
        "broken promises stay counted",
        SLOTS,
        "StateSlots.free_reserved",
        "self.num_reserved -= 1\nself.blank_slots.append(slot)",
        "self.blank_slots.append(slot)",
    ),
    Mutant(
        "a broken promise loses its slot",
        SLOTS,
        "StateSlots.free_reserved",
        "self.num_reserved -= 1\nself.blank_slots.append(slot)",
        "self.num_reserved -= 1",
    ),
    Mutant(
        "a state of a failed row is kept",
        STATES,
        "TableStates.commit",
        "is_cached = is_whole and bool(",
        "is_cached = bool(",
    ),
    Mutant(
        "a state hangs on a block without a name",
        STATES,
        "TableStates.commit",
        "is_cached = is_whole and bool(self._pool.named[table.blocks[-1]])",
        "is_cached = is_whole",
    ),
    Mutant("who failed goes on with a spoilt state", STATES, "TableStates.commit", "if not is_whole:", "if False:"),
    Mutant("who went back names nothing any more", STATES, "TableStates._roll_back", "table.is_naming = True", ""),
    Mutant(
        "who went back gives up a stranger's state",
        STATES,
        "TableStates._roll_back",
        "if table.last_cached_block in dropped_blocks:",
        "if False:",
    ),
    # -- what leaves --
    Mutant("a use does not renew", SLOTS, "StateSlots.use", "self.cached_slots.move_to_end(block)", ""),
    Mutant(
        "a use leaves a state passing",
        SLOTS,
        "StateSlots.use",
        "self.transients.discard(block)\nif block in",
        "if block in",
    ),
    Mutant("the newest state leaves first", SLOTS, "StateSlots._take", "popitem(last=False)", "popitem()"),
    Mutant(
        "what has left is still passing",
        SLOTS,
        "StateSlots._take",
        "popitem(last=False)\nself.transients.discard(block)",
        "popitem(last=False)",
    ),
    Mutant("states that leave are not counted", SLOTS, "StateSlots._take", "self.num_evictions += 1", ""),
    Mutant("a state outlives its block", NAMES, "BlockNames.forget", "if self._slots.num_slots:", "if False:"),
    Mutant("a state outlives a clear", NAMES, "BlockNames.clear", "self._slots.clear()", ""),
    Mutant(
        "a clear loses pinned slots",
        SLOTS,
        "StateSlots.clear",
        "[*self.cached_slots.values(), *self.pinned_slots.values()]",
        "self.cached_slots.values()",
    ),
    # -- what is found --
    Mutant(
        "blocks without a state are a hit",
        STATES,
        "TableStates.usable_blocks",
        "return blocks[: self.slots.num_usable(blocks)]",
        "return blocks",
    ),
    Mutant(
        "the shallowest state is taken",
        SLOTS,
        "StateSlots.num_usable",
        "range(len(blocks), 0, -1)",
        "range(1, len(blocks) + 1)",
    ),
    Mutant(
        "where prompts part is forgotten",
        STATES,
        "TableStates.usable_blocks",
        "len(table.blocks) + len(blocks)",
        "len(table.blocks)",
    ),
    Mutant("a missing state is not told", TREE, "PrefixTree.divergence", "if first_unusable:", "if False:"),
    Mutant(
        "blocks behind the last state are told as cached",
        TREE,
        "PrefixTree.divergence",
        "return Divergence(num_usable * self.block_size, reason)",
        "return Divergence(num_cached, reason)",
    ),
    # -- pins --
    Mutant(
        "a pinned state leaves with the others",
        SLOTS,
        "StateSlots.pin_state",
        "= self.cached_slots.pop(block)",
        "= self.cached_slots[block]",
    ),
    Mutant(
        "an unpinned state is lost",
        SLOTS,
        "StateSlots.unpin_states",
        "self.cached_slots[block] = self.pinned_slots.pop(block)",
        "self.pinned_slots.pop(block)",
    ),
    Mutant(
        "pins have no budget of slots",
        STATES,
        "TableStates.num_pinnable",
        "if num_usable and self.slots.may_pin(blocks[num_usable - 1], self._pin_share) else 0",
        "",
    ),
    Mutant(
        "what was reserved is pinned away",
        SLOTS,
        "StateSlots.may_pin",
        "and len(self.pinned_slots) + self.num_reserved < self._max_fixed",
        "",
    ),
    Mutant(
        "a pin that runs out keeps its state",
        MEMORY,
        "KVMemory._free_pinned",
        "self.slots.unpin_states(self.pins.select_unpinned(blocks))",
        "",
    ),
    Mutant(
        "one of two pins takes the state with it",
        MEMORY,
        "KVMemory._end_pin",
        "self.pins.select_unpinned(table.blocks))",
        "table.blocks)",
    ),
    # -- the memory's verbs --
    Mutant(
        "a fork of fewer tokens than computed",
        MEMORY,
        "KVMemory.fork",
        "if self.states is not None and num_tokens else 0",
        "if False else 0",
    ),
    Mutant(
        "drafts enter a state",
        MEMORY,
        "KVMemory._check_reservable",
        "if num_drafts and self.states is not None:",
        "if False:",
    ),
    Mutant(
        "a state is kept beside a border",
        MEMORY,
        "KVMemory._check_reservable",
        "(end % self.config.block_size or self.states is None)",
        "self.states is None",
    ),
    # -- borders --
    Mutant("runs pass over borders", BORDERS, "tokens_to_border", "if start < border < end:", "if False:"),
    Mutant(
        "a run ends on any border",
        BORDERS,
        "tokens_to_border",
        "start < border < end:",
        "start < border < start + num_tokens:",
    ),
    Mutant(
        "a state is kept where nobody can use it",
        BORDERS,
        "_last_full_border",
        "return (num_tokens - 1) // block_size * block_size",
        "return num_tokens // block_size * block_size",
    ),
    Mutant(
        "sparse borders do not thin out",
        BORDERS,
        "_next_sparse_border",
        "first << (position // first).bit_length()",
        "first * (position // first + 1)",
    ),
    Mutant(
        "the end of a prompt does not last",
        BORDERS,
        "checkpoint_after",
        "if end in (_last_full_border(sequence.num_prompt_tokens, block_size),",
        "if end in (",
    ),
    Mutant(
        "who comes back passes over the end of its prompt",
        BORDERS,
        "tokens_to_border",
        "_last_full_border(sequence.num_prompt_tokens, block_size),",
        "",
    ),
    Mutant(
        "a state that is made again is missing",
        TREE,
        "PrefixTree.divergence",
        "MissReason.COMPUTING if first_unusable in in_flight else MissReason.STATE_MISSING",
        "MissReason.STATE_MISSING",
    ),
    Mutant(
        "nothing is sparse",
        BORDERS,
        "checkpoint_after",
        "return StateCheckpoint.SPARSE if",
        "return StateCheckpoint.TRANSIENT if",
    ),
    # -- events --
    Mutant(
        "blocks without states are told", ANNOUNCER, "KVPublisher.publish_named", "self._published is None:", "True:"
    ),
    Mutant(
        "blocks are told twice",
        ANNOUNCER,
        "KVPublisher.publish_state",
        "while first and not published[table.blocks[first - 1]]:",
        "while first:",
    ),
    Mutant(
        "what was not told is taken back",
        ANNOUNCER,
        "KVPublisher.publish_removed",
        "strict=True) if published[block]]",
        "strict=True)]",
    ),
    Mutant(
        "what was taken back counts as told",
        ANNOUNCER,
        "KVPublisher.publish_removed",
        "published[block] = 0",
        "pass",
    ),
    Mutant(
        "a clear leaves blocks told",
        ANNOUNCER,
        "KVPublisher.publish_cleared",
        "self._published = bytearray(len(self._published))",
        "pass",
    ),
    Mutant("a kept state is not told", MEMORY, "KVMemory.commit", "self.names.publish_state(table)", "pass"),
    # -- scheduler and engine --
    Mutant(
        "plans do not say what to keep",
        SCHEDULER,
        "Scheduler.plan",
        "tuple(items), slot_copies, cache_copies,",
        "tuple(items), slot_copies, (),",
    ),
    Mutant(
        "plans do not say what to copy",
        SCHEDULER,
        "Scheduler.plan",
        "tuple(items), slot_copies, cache_copies,",
        "tuple(items), (), cache_copies,",
    ),
    Mutant("nothing is kept", SCHEDULER, "Scheduler._reserve", "checkpoint_after(sequence, num_tokens)", "None"),
    Mutant(
        "prompts are run in one go",
        SCHEDULER,
        "Scheduler._num_tokens_for",
        "else tokens_to_border(sequence, num_tokens)",
        "else num_tokens",
    ),
    Mutant(
        "a hit goes beyond where siblings branch off",
        SCHEDULER,
        "Scheduler._match",
        "tokens = tokens[: point + 1]",
        "tokens = tokens[:]",
    ),
    Mutant(
        "siblings never start from a hit",
        SCHEDULER,
        "Scheduler._match",
        "tokens = tokens[: point + 1]",
        "tokens = tokens[:point]",
    ),
    Mutant(
        "who finds the whole prompt forgets its siblings",
        SCHEDULER,
        "Scheduler._num_tokens_for",
        "if self.memory.states is not None:",
        "if False:",
    ),
    Mutant("rows do not say which slot is theirs", ROWS, "work_item", "table.state_slot or 0", "0"),
    Mutant("slots of a torn step are relied on", ENGINE, "Engine.step", "self._preempt_recurrent()", ""),
    Mutant(
        "a model with states guesses",
        "core/scheduling/ngrams.py",
        "make_scheduler",
        "if not has_drafts or memory.states is not None:",
        "if not has_drafts:",
    ),
]
