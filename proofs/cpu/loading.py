"""Loads models for the sections of this proof, as checkpoints or as decoders of the CPU backend."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.steps import GIB, MAX_SEQUENCE_TOKENS, MAX_STEP_TOKENS
from quire.backends.cpu.decoder import Decoder
from quire.backends.cpu.load import load_model
from quire.backends.kernels.threads import use_threads
from quire.checkpoints import Checkpoint, quiet, resolve
from quire.config import ModelSettings

BUDGET_BYTES = 20 * GIB
AUTO: Mapping[str, Any] = {"dtype": "auto"}
"""The default: weights in the format of the file."""
FLOAT32: Mapping[str, Any] = {"dtype": "float32"}
BFLOAT16: Mapping[str, Any] = {"dtype": "bfloat16"}


def opened(model: Path) -> Checkpoint:
    """Open a file: its config, tokenizer and tensors."""
    return resolve(str(model), progress=quiet)


def load_decoder(model: Path, **settings: Any) -> Decoder:
    """Load the file with the CPU backend."""
    sizes = {"max_step_tokens": MAX_STEP_TOKENS, "max_sequence_tokens": MAX_SEQUENCE_TOKENS}
    use_threads(None)
    return load_model(opened(model), ModelSettings(**{**sizes, **settings}), BUDGET_BYTES, lambda _done, _total: None)
