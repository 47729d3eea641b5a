"""Settings of the queue, KV events and the KV key: a secret from which the hashes of KV blocks are derived."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.config.home import expand_home
from quire.errors import ConfigError

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """Settings of the queue, KV events and the KV key. Requests of a priority class are scheduled as if they had
    arrived earlier by the head start of this class."""

    head_start_high_s: float = 60.0
    head_start_normal_s: float = 20.0
    head_start_low_s: float = 0.0
    queue: int = 512
    """Maximum number of waiting requests."""
    kv_key_file: Path | None = None
    stuck_step_s: float = 30.0
    """A worker without progress for this many seconds is replaced; its requests continue in the new worker."""

    kv_events: str | None = None
    """ZMQ endpoint that publishes KV-cache events; None: no events."""
    kv_events_replay: str | None = None
    kv_events_topic: str | None = None
    kv_events_encoding: Literal["map", "array"] = "map"

    def __post_init__(self) -> None:
        if not self.head_start_high_s >= self.head_start_normal_s >= self.head_start_low_s:
            raise ConfigError(
                "expected head_start_high_s >= head_start_normal_s >= head_start_low_s, "
                f"got {self.head_start_high_s:g}, {self.head_start_normal_s:g} and {self.head_start_low_s:g}; "
                "use equal values to schedule all classes alike",
                ("head_start_high_s", "head_start_normal_s", "head_start_low_s"),
            )
        if not self.stuck_step_s > 0:
            message = f"expected stuck_step_s above 0, got {self.stuck_step_s:g}; 30 suits most machines"
            raise ConfigError(message, ("stuck_step_s",))

    def read_kv_key(self) -> bytes | None:
        """Return the secret in `kv_key_file`; None if it is not set, and the server makes a new secret at each start.
        Raises ConfigError if the file is not readable, not private or of the wrong length."""
        if self.kv_key_file is None:
            return None
        path = expand_home(self.kv_key_file, hint="kv_key_file to a full path")
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                key = file.read(KEY_BYTES + 1) if stat.S_ISREG(mode) else b""
        except OSError as error:
            message = f"cannot read kv_key_file {path}: {error.strerror}; {_creation_hint(path)}"
            raise ConfigError(message, ("kv_key_file",), code="key_not_readable") from error
        _check_key(path, mode, key)
        return key


def _check_key(path: Path, mode: int, key: bytes) -> None:
    if stat.S_IMODE(mode) & 0o077:
        message = f"expected kv_key_file to be readable only by its owner, got mode {stat.S_IMODE(mode):04o} of {path}"
        raise ConfigError(f"{message}; run: chmod 600 {path}", ("kv_key_file",), code="key_not_private")
    if len(key) != KEY_BYTES:
        size = "more" if len(key) > KEY_BYTES else str(len(key))
        message = f"expected {KEY_BYTES} bytes in kv_key_file, got {size} in {path}; {_creation_hint(path)}"
        raise ConfigError(message, ("kv_key_file",), code="wrong_key_length")


def _creation_hint(path: Path) -> str:
    return f"make one with: (umask 077; head -c {KEY_BYTES} /dev/urandom > {path})"
