"""Opens tokenizer.json; a damaged file raises CheckpointError instead of a panic in the tokenizers library."""

from pathlib import Path
from typing import TYPE_CHECKING

from quire.checkpoints.strict_json import MAX_JSON_BYTES
from quire.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLE_TEXT = "A trial: 2 words, ünï\n"


def load_tokenizer(path: Path) -> "Tokenizer":
    """Load a tokenizer, disable padding and truncation, and test it on a short text. Raises CheckpointError."""
    from tokenizers import Tokenizer

    if not path.is_file():
        problem = f"expected a tokenizer.json in {path.parent.name}, found none"
        hint = "convert the model's tokenizer with transformers' save_pretrained"
        raise CheckpointError(f"{problem}; {hint}", code="tokenizer_missing")
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            sizes = f"at most {MAX_JSON_BYTES:,} bytes, got {path.stat().st_size:,}"
            raise CheckpointError(f"expected {path.name} to have {sizes}; download the model again")
        tokenizer = Tokenizer.from_file(str(path))
        # The file may enable padding or truncation; a server needs exactly the tokens of the text.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.decode(tokenizer.encode(SAMPLE_TEXT).ids)
    except (KeyboardInterrupt, SystemExit, CheckpointError):
        raise
    except BaseException as error:  # a panic in Rust arrives as a BaseException
        message = f"{path.name} cannot be used: {str(error)[:200]}; download the model again"
        raise CheckpointError(message, code="invalid_tokenizer") from error
    return tokenizer
