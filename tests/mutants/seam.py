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
        "if token_id in params.stop_token_ids and",
        "if count == len(token_ids) and token_id in params.stop_token_ids and",
    ),
    Mutant(
        "what follows a stop is said",
        SCHEDULER,
        "enumerate(chosen if len(chosen) == num_taken else chosen[:num_taken])",
        "enumerate(chosen)",
    ),
    Mutant(
        "what follows a stop is charged", SCHEDULER, "num_new_prompt, num_taken)", "num_new_prompt, len(row.token_ids))"
    ),
    Mutant("what is forced is not taken", ROWS, "        tokens += forced\n", "        pass\n"),
    Mutant(
        "what is forced counts as computed",
        SCHEDULER,
        "item.num_true_tokens(min(num_taken, len(row.token_ids)))",
        "item.num_true_tokens(num_taken)",
    ),
    Mutant(
        "wrong drafts are committed",
        STEP,
        "return self.sampling.position + num_taken - 1 - self.first_position",
        "return len(self.token_ids)",
    ),
    Mutant("the token just chosen counts as computed", STEP, "+ num_taken - 1 -", "+ num_taken -"),
    Mutant(
        "a result may say what was not guessed",
        ROWS,
        " or tokens[:-1] != drafts[: len(tokens) - 1]:",
        ":",
    ),
    Mutant("a result may have more tokens than its drafts", ROWS, "<= len(tokens) <= most or", "<= len(tokens) or"),
    # -- drafts --
    Mutant("penalties do not see drafts", STEP, "self.known_tokens + drafts", "self.known_tokens"),
    Mutant(
        "one draw for all positions",
        STEP,
        "position=self.position + len(drafts), known",
        "position=self.position, known",
    ),
    Mutant("the last token there may be is guessed", DRAFTS, "num_wanted - 1,", "num_wanted,"),
    Mutant(
        "guesses go beyond the longest sequence",
        DRAFTS,
        "self._max_sequence_tokens - num_known - 1)",
        "1 << 30)",
    ),
    Mutant(
        "guesses take tokens of the step that others need",
        DRAFTS,
        "config.max_step_tokens - self._num_fed",
        "config.max_step_tokens - len(placement.running)",
    ),
    Mutant("every sequence may guess as if it were alone", DRAFTS, "        self._num_left -= len(drafts)\n", ""),
    Mutant(
        "guesses take blocks that others need",
        DRAFTS,
        "memory.num_free_blocks - placement.needs().num_blocks",
        "memory.num_free_blocks",
    ),
    Mutant("guesses do not count the blocks they take", DRAFTS, "        self._num_blocks -= num_blocks\n", ""),
    Mutant("the middle of a prompt is guessed at", DRAFTS, "if table.num_computed + num_tokens < num_known or", "if"),
    Mutant(
        "blocks of wrong drafts are kept", MEMORY, "        if num_tokens < num_in_flight:\n", "        if False:\n"
    ),
    Mutant(
        "others wait for a guess",
        MEMORY,
        "known_end // block_size, end // block_size",
        "end // block_size, end // block_size",
    ),
    Mutant("drafts have no digest", MEMORY, "[*tokens, *drafts] if drafts else tokens", "tokens"),
    Mutant("drafts in the middle of what is known", MEMORY, " or (num_drafts and known_end < num_known):", ":"),
    Mutant(
        "a wrong draft is accepted",
        ACCEPTANCE,
        "if at == len(drafts) or token_id != drafts[at]:",
        "if at == len(drafts):",
    ),
    Mutant("one right draft is enough", ACCEPTANCE, "token_id != drafts[at]:", "at == 1:"),
    # -- prompts alone, masks, adapters --
    Mutant(
        "a prompt alone is answered", ROWS, "if end == len(tokens) and params.max_tokens:", "if end == len(tokens):"
    ),
    Mutant(
        "a prompt alone never ends",
        SCHEDULER,
        "        if num_taken == 0 and sequence.num_uncomputed == 0:\n",
        "        if False:\n",
    ),
    Mutant(
        "every chunk of a prompt ends it",
        SCHEDULER,
        "        if num_taken == 0 and sequence.num_uncomputed == 0:\n",
        "        if num_taken == 0:\n",
    ),
    Mutant("scores are reported from the wrong token on", ROWS, "Scoring(first + 1, targets", "Scoring(first, targets"),
    Mutant("masks are read from the other end", ORACLE, ">> token_id % 8", ">> (7 - token_id % 8)"),
    Mutant("a mask may be too short", ACCEPTANCE, " or any(len(one) != num_bytes for one in item_masks):", ":"),
    Mutant(
        "an adapter that is not there is served", POLICY, "if adapter := request.", "if adapter := False and request."
    ),
    Mutant(
        "items do not name their adapter",
        ROWS,
        "adapter, state_slot = request.namespace.adapter,",
        'adapter, state_slot = "",',
    ),
]
