"""Text assets (tokenizer, chat template and related settings) of a checkpoint, for gateways."""

from quire.checkpoints import Checkpoint
from quire.config import ModelSettings
from quire.errors import CheckpointError
from quire.fleet.protocol.messages import TextAssets


def text_assets_of(checkpoint: Checkpoint, settings: ModelSettings) -> TextAssets:
    """Read the text assets of a checkpoint. Raises CheckpointError if it has no tokenizer.json."""
    if checkpoint.tokenizer_file is None:
        raise CheckpointError(f"expected a tokenizer.json in {checkpoint.name}, got none; quire needs it for text")
    return TextAssets(
        tokenizer_json=checkpoint.tokenizer_file.read_bytes(),
        chat_template=checkpoint.chat_template,
        eos_token_ids=tuple(sorted(checkpoint.eos_token_ids)),
        eos_texts=tuple(sorted(checkpoint.eos_texts)),
        special_tokens=checkpoint.special_tokens,
        generation_defaults=checkpoint.generation_defaults,
        writes_tools=settings.tool_format == "hermes",
    )
