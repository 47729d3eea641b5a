"""The trace file of each model of a server: created at startup for models that stay loaded, else on the first load."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from quire.config import OnDemandModel, ServerSettings
    from quire.engine.trace_recorder import TraceSettings

KEY_BYTES = 32


class ModelTraces:
    """Trace settings of each model of one server, if tracing is on."""

    def __init__(self, settings: "ServerSettings", models: "Sequence[OnDemandModel]") -> None:
        """Create the trace files of models that stay loaded. Raises ConfigError if a file cannot be created."""
        self._settings = settings
        self._path = settings.trace_path()
        self._names = [model.name for model in models]
        self._settings_by_name: dict[str, TraceSettings] = {}
        for model in models:
            if model.is_kept:
                self.of(model.name)

    def of(self, name: str) -> "TraceSettings | None":
        """Return this model's trace settings; None: tracing is off. Raises ConfigError if no file can be created."""
        if self._path is None:
            return None
        if name not in self._settings_by_name:
            from quire import __version__
            from quire.engine.trace_recorder import TraceSettings
            from quire.observe.trace_file import make_trace_file

            path, settings = trace_path_of(self._path, self._names.index(name)), self._settings
            make_trace_file(path)
            limits = (settings.trace_max_bytes, os.urandom(KEY_BYTES), settings.trace_tokens)
            self._settings_by_name[name] = TraceSettings(str(path), *limits, __version__)
        return self._settings_by_name[name]


def trace_path_of(path: "Path", index: int) -> "Path":
    """Return the trace path of the model with this index, which starts at 0: trace.jsonl, trace-2.jsonl, ..."""
    return path.with_stem(f"{path.stem}-{index + 1}") if index else path
