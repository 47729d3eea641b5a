"""The trace file of each model of a server: created when the model is first opened, or at once if it is kept."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from quire.config import OnDemandModel, ServerSettings
    from quire.engine.trace_recorder import TraceSettings

KEY_BYTES = 32


class ModelTraces:
    """Trace settings of one server's models, if tracing is on."""

    def __init__(self, settings: "ServerSettings", models: "Sequence[OnDemandModel]") -> None:
        """Raises ConfigError if a file that is needed at once cannot be created."""
        self._settings = settings
        self._path = settings.trace_path()
        self._names = [model.name for model in models]
        self._made: dict[str, TraceSettings] = {}
        for model in models:
            if model.is_kept:
                self.of(model.name)

    def of(self, name: str) -> "TraceSettings | None":
        """Where this model's consecutive workers write. Raises ConfigError if the file cannot be created."""
        if self._path is None:
            return None
        if name not in self._made:
            self._made[name] = self._make(trace_path_of(self._path, self._names.index(name)))
        return self._made[name]

    def _make(self, path: "Path") -> "TraceSettings":
        from quire import __version__
        from quire.engine.trace_recorder import TraceSettings
        from quire.observe.trace_file import make_trace_file

        make_trace_file(path)
        settings = self._settings
        key = os.urandom(KEY_BYTES)
        return TraceSettings(str(path), settings.trace_max_bytes, key, settings.trace_tokens, __version__)


def trace_path_of(path: "Path", number: int) -> "Path":
    """Trace path of the model with this number, from zero: trace.jsonl, trace-2.jsonl."""
    return path.with_stem(f"{path.stem}-{number + 1}") if number else path
