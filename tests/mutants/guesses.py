"""Bugs of guesses: where they are found, which of them pay, and what a grammar forces in their places."""

from tests.mutants.kill import Mutant

TESTS = (
    "tests/unit/core/scheduling/test_step_cost.py",
    "tests/unit/core/scheduling/test_ngrams.py",
    "tests/unit/core/scheduling/test_drafts.py",
    "tests/unit/engine/test_guides.py",
)
NGRAMS = "core/scheduling/ngrams.py"
COST = "core/scheduling/step_cost.py"
CHANCES = "core/scheduling/acceptance_rates.py"
DRAFTS = "core/scheduling/drafts.py"
GUIDES = "engine/guides.py"

MUTANTS = [
    Mutant(
        "other groups' answers are guessed",
        NGRAMS,
        "Ngrams.propose",
        "self._outputs.get(sequence.request.namespace, b",
        'b"".join(self._outputs.values()) or (b',
    ),
    Mutant(
        "a place that is no border of tokens counts",
        NGRAMS,
        "_end_of_last_match",
        "while pos > 0 and pos % TOKEN_BYTES:",
        "while False:",
    ),
    Mutant("the last run is found", NGRAMS, "Ngrams.propose", "len(own_tokens) - TOKEN_BYTES", "len(own_tokens)"),
    Mutant("one answer runs into the next", NGRAMS, "Ngrams.store_output", ".tobytes() + _SEPARATOR", ".tobytes()"),
    Mutant(
        "answers are never dropped",
        NGRAMS,
        "Ngrams.store_output",
        "del outputs[: max(0, len(outputs) - OUTPUT_BYTES)]",
        "",
    ),
    Mutant(
        "the oldest run is taken",
        NGRAMS,
        "_end_of_last_match",
        "pos = tokens.rfind(ngram, start, end)",
        "pos = tokens.find(ngram, start, end)",
    ),
    Mutant("later tokens are not searched", NGRAMS, "_own_bytes", "+= array(", '+= b"" if token_bytes else array('),
    Mutant(
        "a guess costs one sequence's time alone",
        COST,
        "StepCost.min_acceptance",
        "MARGIN * num_sequences *",
        "MARGIN *",
    ),
    Mutant(
        "prices are those of the smallest step",
        COST,
        "StepCost.seconds",
        "start_s + slope * max(0, num_tokens - start)",
        "self.points[0][1]",
    ),
    Mutant("what a text may end is guessed at", DRAFTS, "DraftBudget.take", "or request.has_stop_texts:", ":"),
    Mutant(
        "guesses are as likely as the first of them",
        DRAFTS,
        "DraftBudget._worthwhile_drafts",
        "likelihood *= token_likelihood",
        "likelihood = token_likelihood",
    ),
    Mutant(
        "all sources share one chance",
        DRAFTS,
        "DraftBudget._worthwhile_drafts",
        "sequence.draft_source = draft.source",
        "sequence.draft_source = 0",
    ),
    Mutant(
        "guesses behind a wrong one count as tried",
        CHANCES,
        "AcceptanceRate.with_result",
        "min(num_accepted + 1, num_drafts)",
        "num_drafts",
    ),
    Mutant(
        "what stopped paying is never tried again",
        CHANCES,
        "AcceptanceRate.likelihood",
        "MAX_AGE_TOKENS else UNKNOWN\nreturn (PRIOR",
        "1 << 60 else UNKNOWN\nreturn (PRIOR",
    ),
    Mutant(
        "what was chosen in the place of a forced token counts",
        GUIDES,
        "GrammarMatchers._follow_tokens",
        "count += num_equal",
        "count += len(forced)",
    ),
    Mutant(
        "an end that was guessed ends nothing",
        GUIDES,
        "GrammarMatchers._follow_tokens",
        "if is_complete or num_equal < len(forced):",
        "if num_equal < 0:",
    ),
]
