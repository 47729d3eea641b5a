"""How well a model predicts a text that does not change: perplexity over this project's first decisions."""

from functools import cache

import numpy as np
from tokenizers import Tokenizer

from benchmarks.record import ROOT
from benchmarks.steps import BLOCK, MAX_STEP_TOKENS, make_store
from benchmarks.test_model import smollm2
from quire.backends.cpu.decoder import Decoder
from quire.backends.host.batch import make_batch
from quire.checkpoints import Checkpoint
from quire.config import Dtype
from quire.core.step import WorkItem

FIXED_TEXT = tuple(f"000{number}-*.md" for number in range(1, 7))
"""Decisions that were taken long ago and are not written again."""


@cache
def _words() -> str:
    files = [file for pattern in FIXED_TEXT for file in sorted((ROOT / "docs" / "adr").glob(pattern))]
    return "\n".join(file.read_text() for file in files)


def fixed_text(checkpoint: Checkpoint | None = None) -> list[int]:
    """In a model's tokens; by default the test model's."""
    return Tokenizer.from_file(str((checkpoint or smollm2()).tokenizer_file)).encode(_words()).ids


def perplexity(model: Decoder, tokens: list[int], dtype: Dtype) -> float:
    """Of a text as one sequence, with keys and values held in this type."""
    table = tuple(range(1, -(-len(tokens) // BLOCK) + 1))
    store = make_store(model, len(table), dtype)
    losses = []
    for first in range(0, len(tokens) - 1, MAX_STEP_TOKENS):
        fed = tokens[first : min(first + MAX_STEP_TOKENS, len(tokens) - 1)]
        batch = make_batch([WorkItem(0, tuple(fed), first, table)], BLOCK)
        logits = model.compute(batch, store, np.arange(len(fed))).logits.astype(np.float64)
        below = logits - logits.max(axis=1, keepdims=True)
        targets = tokens[first + 1 : first + 1 + len(fed)]
        losses.append(np.log(np.exp(below).sum(axis=1)) - below[np.arange(len(fed)), targets])
    return float(np.exp(np.concatenate(losses).mean()))
