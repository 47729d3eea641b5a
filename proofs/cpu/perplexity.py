"""Perplexity of a model on a text that does not change: this project's first decision records."""

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
"""Files of old decision records, which are no longer edited."""


@cache
def _text() -> str:
    files = [file for pattern in FIXED_TEXT for file in sorted((ROOT / "docs" / "adr").glob(pattern))]
    return "\n".join(file.read_text() for file in files)


def fixed_text(checkpoint: Checkpoint | None = None) -> list[int]:
    """Return the text as tokens of a model, by default the test model."""
    return Tokenizer.from_file(str((checkpoint or smollm2()).tokenizer_file)).encode(_text()).ids


def perplexity(model: Decoder, tokens: list[int], dtype: Dtype) -> float:
    """Return the perplexity of a text as one sequence, with keys and values of this type."""
    table = tuple(range(1, -(-len(tokens) // BLOCK) + 1))
    store = make_store(model, len(table), dtype)
    losses = []
    for first in range(0, len(tokens) - 1, MAX_STEP_TOKENS):
        chunk = tokens[first : min(first + MAX_STEP_TOKENS, len(tokens) - 1)]
        batch = make_batch([WorkItem(0, tuple(chunk), first, table)], BLOCK)
        logits = model.compute(batch, store, np.arange(len(chunk))).logits.astype(np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        targets = tokens[first + 1 : first + 1 + len(chunk)]
        losses.append(np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(chunk)), targets])
    return float(np.exp(np.concatenate(losses).mean()))
