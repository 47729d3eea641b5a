"""How requests wait, and the secret that names blocks: settings of a server that are not the model's."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.config.home import expanded
from quire.errors import ConfigError

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """The queue's bounds and classes, and where the KV key is."""

    head_start_high_s: float = 60.0
    head_start_normal_s: float = 20.0
    head_start_low_s: float = 0.0
    queue: int = 512
    """How many requests may wait."""
    kv_key_file: Path | None = None
    stuck_step_s: float = 30.0
    """A worker that makes no progress for longer is replaced, and what ran is asked again."""

    kv_events: str | None = None
    """Where cached blocks are announced to routers; None: nowhere."""
    kv_events_replay: str | None = None
    kv_events_topic: str | None = None
    kv_events_encoding: Literal["map", "array"] = "map"

    def __post_init__(self) -> None:
        if not self.head_start_high_s >= self.head_start_normal_s >= self.head_start_low_s:
            raise ConfigError(
                "head_start_high_s must be at least head_start_normal_s, and that at least head_start_low_s, "
                f"{self.head_start_high_s:g}, {self.head_start_normal_s:g} and {self.head_start_low_s:g} given; "
                "equal ones make classes equal",
                ("head_start_high_s", "head_start_normal_s", "head_start_low_s"),
            )
        if not self.stuck_step_s > 0:
            message = f"stuck_step_s must be above 0, {self.stuck_step_s:g} given; 30 suits most machines"
            raise ConfigError(message, ("stuck_step_s",))

    def read_kv_key(self) -> bytes | None:
        """The secret in `kv_key_file`, or None where there is no such file and each start makes its own."""
        if self.kv_key_file is None:
            return None
        path = expanded(self.kv_key_file, "kv_key_file to a full path")
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                key = file.read(KEY_BYTES + 1) if stat.S_ISREG(mode) else b""
        except OSError as error:
            message = f"kv_key_file {path} cannot be read: {error.strerror}; {_how_to_make(path)}"
            raise ConfigError(message, ("kv_key_file",)) from error
        _check_key(path, mode, key)
        return key


def _check_key(path: Path, mode: int, key: bytes) -> None:
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"kv_key_file must be readable by its owner alone, {path} has mode {stat.S_IMODE(mode):04o}; "
            f"run: chmod 600 {path}",
            ("kv_key_file",),
        )
    if len(key) != KEY_BYTES:
        size = "more" if len(key) > KEY_BYTES else str(len(key))
        message = f"kv_key_file must hold {KEY_BYTES} bytes, {path} holds {size}; {_how_to_make(path)}"
        raise ConfigError(message, ("kv_key_file",))


def _how_to_make(path: Path) -> str:
    return f"make one with: (umask 077; head -c {KEY_BYTES} /dev/urandom > {path})"
