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
        "self._answers.get(sequence.request.namespace, b",
        'b"".join(self._answers.values()) or (b',
    ),
    Mutant(
        "a place that is no border of tokens counts",
        NGRAMS,
        "_last_place",
        "while at > 0 and at % TOKEN_BYTES:",
        "while False:",
    ),
    Mutant("the last run itself is found", NGRAMS, "Ngrams.propose", "end = len(own) - TOKEN_BYTES", "end = len(own)"),
    Mutant("one answer runs into the next", NGRAMS, "Ngrams.ended", ".tobytes() + _BETWEEN", ".tobytes()"),
    Mutant("answers are kept for ever", NGRAMS, "Ngrams.ended", "del kept[: max(0, len(kept) - ANSWER_BYTES)]", ""),
    Mutant(
        "the oldest run is taken",
        NGRAMS,
        "_last_place",
        "at = tokens.rfind(run, first, end)",
        "at = tokens.find(run, first, end)",
    ),
    Mutant(
        "later tokens are not searched", NGRAMS, "_own_bytes", "known += array(", 'known += b"" if known else array('
    ),
    Mutant(
        "a guess costs one sequence's time alone",
        COST,
        "StepCost.least_likelihood",
        "MARGIN * num_sequences *",
        "MARGIN *",
    ),
    Mutant(
        "prices are those of the smallest step",
        COST,
        "StepCost.seconds",
        "low_s + slope * max(0, num_tokens - low)",
        "self.points[0][1]",
    ),
    Mutant("what a text may end is guessed at", DRAFTS, "DraftBudget.take", "or request.has_stop_texts:", ":"),
    Mutant(
        "guesses are as likely as the first of them",
        DRAFTS,
        "DraftBudget._worthwhile",
        "likelihood *= each",
        "likelihood = each",
    ),
    Mutant(
        "all sources share one chance",
        DRAFTS,
        "DraftBudget._worthwhile",
        "sequence.guess_source = guess.source",
        "sequence.guess_source = 0",
    ),
    Mutant(
        "guesses behind a wrong one count as tried",
        CHANCES,
        "AcceptanceRate.after",
        "min(num_right + 1, num_drafts)",
        "num_drafts",
    ),
    Mutant(
        "what stopped paying is never tried again",
        CHANCES,
        "AcceptanceRate.likelihood",
        "FORGOTTEN_TOKENS else UNKNOWN\nreturn (FIRST",
        "1 << 60 else UNKNOWN\nreturn (FIRST",
    ),
    Mutant(
        "what was chosen in the place of a forced token counts",
        GUIDES,
        "GrammarMatchers._followed_tokens",
        "count += num_equal",
        "count += len(forced)",
    ),
    Mutant(
        "an end that was guessed ends nothing",
        GUIDES,
        "GrammarMatchers._followed_tokens",
        "if is_complete or num_equal < len(forced):",
        "if num_equal < 0:",
    ),
]
