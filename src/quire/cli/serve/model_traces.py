"""Which file each model of a server writes its trace into: made when it is first opened, or at once if it stays."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from quire.config import ParkedModel, ServerSettings
    from quire.engine.trace_recorder import TraceSettings

KEY_BYTES = 32


class ModelTraces:
    """The traces of one server, if it writes any."""

    def __init__(self, settings: "ServerSettings", models: "Sequence[ParkedModel]") -> None:
        """Raises ConfigError if a file that is needed at once cannot be made."""
        self._settings = settings
        self._path = settings.trace_path()
        self._names = [model.name for model in models]
        self._made: dict[str, TraceSettings] = {}
        for model in models:
            if model.is_kept:
                self.of(model.name)

    def of(self, name: str) -> "TraceSettings | None":
        """Where this model's workers write, one after the other. Raises ConfigError if the file cannot be made."""
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
    """That of the model with this number, counted from zero: trace.jsonl, trace-2.jsonl."""
    return path.with_stem(f"{path.stem}-{number + 1}") if number else path
