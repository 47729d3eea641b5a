"""Open a model by name: an engine in this process, and the `TextModel` that converts between text and tokens."""

from dataclasses import dataclass

from quire.checkpoints import Checkpoint, Progress, quiet, resolve
from quire.client.request.text_model import TextModel, read_tokenizer
from quire.config import ModelSettings, ServingSettings
from quire.engine.engine import Engine
from quire.engine.loading import kv_key, open_engine, queue_of


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """An engine in this process, and the text model (tokenizer, template, limits) of its checkpoint."""

    engine: Engine
    text: TextModel


def open_model(
    model: str | Checkpoint,
    settings: ModelSettings | None = None,
    *,
    serving: ServingSettings | None = None,
    progress: Progress = quiet,
) -> OpenedModel:
    """Load a model from a directory, GGUF file, Hub id or `Checkpoint`. Raises CheckpointError or ConfigError, with
    what to do in the message.
    """
    serving = serving or ServingSettings()
    checkpoint = resolve(model, progress=progress) if isinstance(model, str) else model
    settings = settings or ModelSettings()
    engine = open_engine(checkpoint, settings, queue_of(serving), kv_key(serving), progress)
    tokenizer = read_tokenizer(checkpoint)
    return OpenedModel(engine, TextModel.of(checkpoint, engine.info, tokenizer, tool_format=settings.tool_format))
