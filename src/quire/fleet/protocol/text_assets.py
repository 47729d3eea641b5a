"""Text assets (tokenizer, chat template and related settings) of a checkpoint, for gateways."""

from quire.checkpoints import Checkpoint
from quire.config import ModelSettings
from quire.errors import CheckpointError
from quire.fleet.protocol.messages import TextAssets


def text_assets_of(checkpoint: Checkpoint, settings: ModelSettings) -> TextAssets:
    """Read the text assets of a checkpoint. Raises CheckpointError if it has no tokenizer.json."""
    if checkpoint.tokenizer_file is None:
        raise CheckpointError(f"{checkpoint.name} has no tokenizer.json; quire needs one to read and write text")
    return TextAssets(
        checkpoint.tokenizer_file.read_bytes(),
        checkpoint.chat_template,
        tuple(sorted(checkpoint.eos_token_ids)),
        tuple(sorted(checkpoint.eos_texts)),
        checkpoint.special_tokens,
        checkpoint.generation_defaults,
        settings.tool_format == "hermes",
    )
