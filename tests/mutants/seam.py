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
        "taken_tokens",
        "if token_id in params.stop_token_ids and",
        "if count == len(token_ids) and token_id in params.stop_token_ids and",
    ),
    Mutant(
        "what follows a stop is said",
        SCHEDULER,
        "Scheduler._apply_row",
        "enumerate(chosen if len(chosen) == num_taken else chosen[:num_taken])",
        "enumerate(chosen)",
    ),
    Mutant(
        "what follows a stop is charged",
        SCHEDULER,
        "Scheduler._apply_row",
        "num_new_prompt, num_taken)",
        "num_new_prompt, len(row.token_ids))",
    ),
    Mutant("what is forced is not taken", ROWS, "take_row", "tokens += forced", "pass"),
    Mutant(
        "what is forced counts as computed",
        SCHEDULER,
        "Scheduler._apply_row",
        "item.num_true_tokens(min(num_taken, len(row.token_ids)))",
        "item.num_true_tokens(num_taken)",
    ),
    Mutant(
        "wrong drafts are committed",
        STEP,
        "WorkItem.num_true_tokens",
        "return self.sampling.position + num_taken - 1 - self.first_position",
        "return len(self.token_ids)",
    ),
    Mutant(
        "the token just chosen counts as computed",
        STEP,
        "WorkItem.num_true_tokens",
        "+ num_taken - 1 -",
        "+ num_taken -",
    ),
    Mutant(
        "a result may say what was not guessed",
        ROWS,
        "take_row",
        "or tokens[:-1] != drafts[: len(tokens) - 1]:",
        ":",
    ),
    Mutant(
        "a result may have more tokens than its drafts",
        ROWS,
        "take_row",
        "<= len(tokens) <= most or",
        "<= len(tokens) or",
    ),
    # -- drafts --
    Mutant("penalties do not see drafts", STEP, "Sampling.after", "self.known_tokens + drafts", "self.known_tokens"),
    Mutant(
        "one draw for all positions",
        STEP,
        "Sampling.after",
        "position=self.position + len(drafts), known",
        "position=self.position, known",
    ),
    Mutant("the last token there may be is guessed", DRAFTS, "DraftBudget.take", "num_wanted - 1,", "num_wanted,"),
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
        "accepted",
        "if at == len(drafts) or token_id != drafts[at]:",
        "if at == len(drafts):",
    ),
    Mutant("one right draft is enough", ACCEPTANCE, "accepted", "token_id != drafts[at]:", "at == 1:"),
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
        "if num_taken == 0 and sequence.num_uncomputed == 0:",
        "if False:",
    ),
    Mutant(
        "every chunk of a prompt ends it",
        SCHEDULER,
        "Scheduler._apply_row",
        "if num_taken == 0 and sequence.num_uncomputed == 0:",
        "if num_taken == 0:",
    ),
    Mutant(
        "scores are reported from the wrong token on",
        ROWS,
        "work_item",
        "Scoring(first + 1, targets",
        "Scoring(first, targets",
    ),
    Mutant("masks are read from the other end", ORACLE, "next_token", ">> token_id % 8", ">> (7 - token_id % 8)"),
    Mutant(
        "a mask may be too short", ACCEPTANCE, "masks_of", "or any(len(one) != num_bytes for one in item_masks):", ":"
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
