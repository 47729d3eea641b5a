"""Settings of a server: address, access control, shutdown, files and logs."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.config.home import expand_home
from quire.errors import ConfigError

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Pattern of the names of keys and cache groups; excludes the separators of longer names that contain these."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys_file: Path | None = None
    """File of API keys. None: keys.json in the configuration folder, if it exists."""
    cache_group: str | None = None
    """Default cache group of keys; keys of one group share cached blocks. None: each key shares only with itself."""
    admin_socket: Path | None = None
    """Path of the operator's Unix socket. None: admin-PORT.sock in quire's runtime folder."""
    drain_s: float = 30.0
    max_open_requests: int = 1024
    first_byte_s: float = 10.0
    """Maximum seconds from a streamed request's body to its first byte. 0: no limit."""
    allow_host: str | None = None
    """Names accepted in the Host header, comma-separated."""
    allow_origin: str | None = None
    """Origins accepted for CORS, comma-separated."""
    alias: str | None = None
    """Other names of models: pairs NAME=MODEL, comma-separated."""
    store: Path | None = None
    """Database of conversations. None: conversations are not stored."""
    store_size_bytes: int = 1 << 30
    stable_prefix: str | None = None
    """Names and patterns of lines to remove from system texts, one per line. None: nothing is removed."""
    drop_images: bool = False
    """Replace images by a placeholder text; otherwise requests with images are rejected."""
    stop_loops: bool = False
    """End answers that repeat themselves, unless the request sets `stop_loops`."""
    effort_budgets: str | None = None
    """Limits of reasoning tokens by effort: pairs EFFORT=TOKENS, comma-separated."""
    no_page: bool = False
    """Serve no chat page at /."""
    models_folder: Path | None = None
    """Folder whose models are served in addition to the models named in settings. None: no folder."""
    idle_s: float | None = None
    """Seconds without a request until an on-demand model is unloaded. None: when another model needs the memory."""
    turn_s: float = 30.0
    """Minimum seconds that an on-demand model serves requests, even if another tenant waits for its memory."""
    trace: Path | None = None
    """Path of the trace. None: no trace is written."""
    trace_max_bytes: int = 1 << 30
    trace_tokens: bool = False
    """Write the actual token ids; otherwise they are permuted with a secret key."""
    otel: str | None = None
    """URL for OpenTelemetry spans. None: OTEL_EXPORTER_OTLP_ENDPOINT, or no spans."""
    log_format: Literal["plain", "json"] = "plain"
    metrics_prefix: str = "vllm"

    @property
    def allowed_hosts(self) -> frozenset[str]:
        """Accepted names in the Host header, besides the server's own."""
        return frozenset((self.allow_host or "").split(",")) - {""}

    @property
    def allowed_origins(self) -> frozenset[str]:
        return frozenset((self.allow_origin or "").split(",")) - {""}

    def store_path(self) -> Path | None:
        """Return the path of the database of conversations, or None."""
        return None if self.store is None else expand_home(self.store, "--store to a full path")

    def trace_path(self) -> Path | None:
        """Return the path of the trace, or None."""
        return None if self.trace is None else expand_home(self.trace, "--trace to a full path").absolute()

    @property
    def aliases(self) -> dict[str, str]:
        """Model names by alias; an alias may contain * for any characters."""
        pairs = [pair.partition("=") for pair in (self.alias or "").split(",") if pair]
        return {name: model for name, _, model in pairs}

    @property
    def thought_limits(self) -> dict[str, int]:
        """Limits of reasoning tokens, by effort."""
        pairs = [pair.partition("=") for pair in (self.effort_budgets or "").split(",") if pair]
        return {effort: int(limit) for effort, _, limit in pairs}

    @property
    def unstable_lines(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.stable_prefix or "").split("\n")))

    @property
    def is_loopback(self) -> bool:
        """Whether the address accepts connections only from this machine."""
        if self.host == "localhost":
            return True
        import ipaddress  # noqa: PLC0415 - only a server needs it

        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def keys_path(self, environ: Mapping[str, str] = os.environ) -> Path:
        """Return the path of the keys file, whether it exists or not."""
        if self.keys_file is not None:
            return expand_home(self.keys_file, "--keys-file to a full path")
        base = environ.get("XDG_CONFIG_HOME") or "~/.config"
        return expand_home(base, "name the file with --keys-file") / "quire" / "keys.json"

    def check_keys_file(self) -> None:
        """Raise ConfigError if `keys_file` is set but missing: a typo must not open the server to all clients."""
        if self.keys_file is not None and not self.keys_path().exists():
            raise ConfigError(
                f"expected an existing keys_file, got {self.keys_path()}; "
                f"create it with: quire keys add NAME --keys-file {self.keys_path()}, or omit it",
                ("keys_file",),
            )

    def admin_path(self, port: int, environ: Mapping[str, str] = os.environ) -> Path:
        """Return the path of the admin socket of the server on this port."""
        if self.admin_socket is not None:
            return expand_home(self.admin_socket, "--admin-socket to a full path")
        base = environ.get("XDG_RUNTIME_DIR") or environ.get("XDG_STATE_HOME") or "~/.local/state"
        return expand_home(base, "name the socket with --admin-socket") / "quire" / f"admin-{port}.sock"

    def check_access_control(self, *, has_keys: bool, allow_no_keys: bool) -> None:
        """Raise ConfigError if other machines can connect without keys, unless `allow_no_keys`."""
        if not (self.is_loopback or has_keys or allow_no_keys):
            raise ConfigError(
                f"host {self.host} accepts other machines, and there are no keys; add one with: quire keys add NAME, "
                "listen on 127.0.0.1, or pass --insecure-no-keys if your own access control is in front of this server",
                ("host",),
            )
