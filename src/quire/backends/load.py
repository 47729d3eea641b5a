"""A backend by name, imported only when it is asked for."""

import os
from collections.abc import Mapping
from typing import Any

from quire.backends.loaded import LoadedRunner, OnRead
from quire.backends.roof import Roof
from quire.checkpoints import Checkpoint
from quire.config import ModelSettings
from quire.errors import ConfigError


def load_backend(checkpoint: Checkpoint, settings: ModelSettings, on_read: OnRead | None = None) -> LoadedRunner:
    """A runner for this checkpoint. The torch backend is the one there is."""
    # A thread that waits for another spins first. By default it spins so long that one busy neighbour makes a step ten
    # times slower; a short spin costs a few percent of a quiet machine. Read when the OpenMP runtime is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    try:
        from quire.backends.torch import load as torch_load  # noqa: PLC0415 - seconds of import, paid when used
    except ImportError as error:
        raise ConfigError(
            f"running a model needs torch and transformers, {error.name!r} is missing; pip install 'quire[torch]'"
        ) from error
    if on_read is None:
        return torch_load.load(checkpoint, settings)
    return torch_load.load(checkpoint, settings, on_read)


def roof_of(config: Mapping[str, Any], settings: ModelSettings) -> Roof:
    """The roof of a model that these settings run, by the backend that runs it."""
    from quire.backends.torch.measured_roof import TorchRoof  # noqa: PLC0415 - seconds of import, paid when used

    return TorchRoof.of(config, settings.dtype, settings.device)
