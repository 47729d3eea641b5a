"""Bugs of what is wanted where: several tokens in a result, drafts, prompts alone, masks; one small change each."""

from tests.mutants.kill import Mutant

TESTS = (
    "tests/unit/core/test_step.py",
    "tests/unit/core/scheduling/test_drafts.py",
    "tests/unit/core/scheduling/test_forced.py",
    "tests/unit/core/scheduling/test_policy.py",
    "tests/unit/core/memory/test_kv_memory.py",
    "tests/unit/core/scheduling/test_scheduler.py",
    "tests/conformance/test_oracle.py",
    "tests/sim",
)

STEP = "core/step.py"
POLICY = "core/scheduling/policy.py"
ROWS = "core/scheduling/rows.py"
DRAFTS = "core/scheduling/drafts.py"
SCHEDULER = "core/scheduling/scheduler.py"
MEMORY = "core/memory/kv_memory.py"
ACCEPTANCE = "backends/acceptance.py"
ORACLE = "backends/oracle.py"

MUTANTS = [
    # -- several tokens in a result --
    Mutant(
        "a stop among several tokens is missed",
        ROWS,
        "token_acceptance",
        "if token_id in params.stop_token_ids and",
        "if count == len(token_ids) and token_id in params.stop_token_ids and",
    ),
    Mutant(
        "what follows a stop is said",
        SCHEDULER,
        "Scheduler._apply_row",
        "enumerate(new_tokens if len(new_tokens) == num_accepted else new_tokens[:num_accepted])",
        "enumerate(new_tokens)",
    ),
    Mutant(
        "what follows a stop is charged",
        SCHEDULER,
        "Scheduler._apply_row",
        "num_new_prompt, num_accepted)",
        "num_new_prompt, len(row.token_ids))",
    ),
    Mutant("what is forced is not taken", ROWS, "row_acceptance", "tokens += forced", "pass"),
    Mutant(
        "what is forced counts as computed",
        SCHEDULER,
        "Scheduler._apply_row",
        "item.num_true_tokens(min(num_accepted, len(row.token_ids)))",
        "item.num_true_tokens(num_accepted)",
    ),
    Mutant(
        "wrong drafts are committed",
        STEP,
        "WorkItem.num_true_tokens",
        "return self.sampling.position + num_accepted - 1 - self.first_position",
        "return len(self.token_ids)",
    ),
    Mutant(
        "the token just chosen counts as computed",
        STEP,
        "WorkItem.num_true_tokens",
        "+ num_accepted - 1 -",
        "+ num_accepted -",
    ),
    Mutant(
        "a result may say what was not guessed",
        ROWS,
        "row_acceptance",
        "or tokens[:-1] != drafts[: len(tokens) - 1]:",
        ":",
    ),
    Mutant(
        "a result may have more tokens than its drafts",
        ROWS,
        "row_acceptance",
        "<= len(tokens) <= max_tokens or",
        "<= len(tokens) or",
    ),
    # -- drafts --
    Mutant("penalties do not see drafts", STEP, "Sampling.after", "self.known_tokens + drafts", "self.known_tokens"),
    Mutant(
        "one draw for all positions",
        STEP,
        "Sampling.after",
        "position=self.position + len(drafts), known_tokens",
        "position=self.position, known_tokens",
    ),
    Mutant("the last token is guessed", DRAFTS, "DraftBudget.take", "num_output_left - 1,", "num_output_left,"),
    Mutant(
        "guesses go beyond the longest sequence",
        DRAFTS,
        "DraftBudget.take",
        "self._max_sequence_tokens - num_known - 1)",
        "1 << 30)",
    ),
    Mutant(
        "guesses take tokens of the step that others need",
        DRAFTS,
        "DraftBudget.__init__",
        "config.max_step_tokens - self._num_fed",
        "config.max_step_tokens - len(placement.running)",
    ),
    Mutant(
        "every sequence may guess as if it were alone", DRAFTS, "DraftBudget.take", "self._num_left -= len(drafts)", ""
    ),
    Mutant(
        "guesses take blocks that others need",
        DRAFTS,
        "DraftBudget.__init__",
        "memory.pool.num_free - placement.needs().num_blocks",
        "memory.pool.num_free",
    ),
    Mutant(
        "guesses do not count the blocks they take", DRAFTS, "DraftBudget.take", "self._num_blocks -= num_blocks", ""
    ),
    Mutant(
        "the middle of a prompt is guessed at",
        DRAFTS,
        "DraftBudget.take",
        "if table.num_computed + num_tokens < num_known or",
        "if",
    ),
    Mutant("blocks of wrong drafts are kept", MEMORY, "KVMemory.commit", "if num_tokens < num_in_flight:", "if False:"),
    Mutant(
        "others wait for a guess",
        MEMORY,
        "KVMemory.reserve",
        "known_end // block_size, end // block_size",
        "end // block_size, end // block_size",
    ),
    Mutant("drafts have no digest", MEMORY, "KVMemory.reserve", "[*tokens, *drafts] if drafts else tokens", "tokens"),
    Mutant(
        "drafts in the middle of what is known",
        MEMORY,
        "KVMemory._check_reservable",
        "or (num_drafts and known_end < num_known):",
        ":",
    ),
    Mutant(
        "a wrong draft is accepted",
        ACCEPTANCE,
        "accepted_tokens",
        "if index == len(drafts) or token_id != drafts[index]:",
        "if index == len(drafts):",
    ),
    Mutant("one right draft is enough", ACCEPTANCE, "accepted_tokens", "token_id != drafts[index]:", "index == 1:"),
    # -- prompts alone, masks, adapters --
    Mutant(
        "a prompt alone is answered",
        ROWS,
        "work_item",
        "if end == len(tokens) and params.max_tokens:",
        "if end == len(tokens):",
    ),
    Mutant(
        "a prompt alone never ends",
        SCHEDULER,
        "Scheduler._apply_row",
        "if num_accepted == 0 and sequence.num_uncomputed == 0:",
        "if False:",
    ),
    Mutant(
        "every chunk of a prompt ends it",
        SCHEDULER,
        "Scheduler._apply_row",
        "if num_accepted == 0 and sequence.num_uncomputed == 0:",
        "if num_accepted == 0:",
    ),
    Mutant(
        "scores are reported from the wrong token on",
        ROWS,
        "work_item",
        "Scoring(start + 1, scored_tokens",
        "Scoring(start, scored_tokens",
    ),
    Mutant("masks are read from the other end", ORACLE, "next_token", ">> token_id % 8", ">> (7 - token_id % 8)"),
    Mutant(
        "a mask may be too short", ACCEPTANCE, "masks_of", "or any(len(mask) != num_bytes for mask in item_masks):", ":"
    ),
    Mutant(
        "an adapter that is not there is served",
        POLICY,
        "check_request",
        "if adapter := request.",
        "if adapter := False and request.",
    ),
    Mutant(
        "items do not name their adapter",
        ROWS,
        "work_item",
        "adapter, state_slot = request.namespace.adapter,",
        'adapter, state_slot = "",',
    ),
]
