"""Where a server listens, who may come in, how it ends and what it writes down."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.config.home import expanded
from quire.errors import ConfigError

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""What a key or a cache group may be called: no character that separates parts of a longer name."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What an operator decides about a server."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys_file: Path | None = None
    """None: keys.json in the configuration folder, if it is there."""
    cache_group: str | None = None
    """Who shares cached blocks, where a key names no group of its own. None: each key alone."""
    admin_socket: Path | None = None
    """None: admin-PORT.sock in a runtime folder of quire's own."""
    drain_s: float = 30.0
    max_open_requests: int = 1024
    allow_host: str | None = None
    """Names, with commas between."""
    allow_origin: str | None = None
    """Origins, with commas between."""
    alias: str | None = None
    """Pairs NAME=MODEL, with commas between."""
    store: Path | None = None
    """None: no conversation is kept."""
    store_size_bytes: int = 1 << 30
    stable_prefix: str | None = None
    """Names and patterns of lines that are taken out of system texts, one on a line. None: nothing is."""
    drop_images: bool = False
    """A text stands where a picture was; otherwise requests with one are refused."""
    no_page: bool = False
    """Nothing is served at /, where else people talk to the models."""
    models_folder: Path | None = None
    """None: there is none. Its models are served beside those that are named."""
    idle_s: float | None = None
    """None: models that are loaded on demand stay until memory is needed."""
    turn_s: float = 30.0
    """A model that was loaded on demand serves every tenant for so long, whoever waits for its memory."""
    trace: Path | None = None
    """None: nothing is written down of what workers do."""
    trace_max_bytes: int = 1 << 30
    trace_tokens: bool = False
    """Token ids are written as they are; else under a permutation."""
    otel: str | None = None
    """None: the variables of OpenTelemetry, or no spans."""
    log_format: str = "plain"
    metrics_prefix: str = "vllm"

    @property
    def allowed_hosts(self) -> frozenset[str]:
        """Names that a Host header may say, beside the server's own."""
        return frozenset((self.allow_host or "").split(",")) - {""}

    @property
    def allowed_origins(self) -> frozenset[str]:
        """Whose web pages may use the server."""
        return frozenset((self.allow_origin or "").split(",")) - {""}

    def store_path(self) -> Path | None:
        """Where conversations are kept."""
        return None if self.store is None else expanded(self.store, "--store to a full path")

    def trace_path(self) -> Path | None:
        """Where a trace is written."""
        return None if self.trace is None else expanded(self.trace, "--trace to a full path").absolute()

    @property
    def aliases(self) -> dict[str, str]:
        """Models by the other names they have; a name may have a * for any characters."""
        pairs = [pair.partition("=") for pair in (self.alias or "").split(",") if pair]
        return {name: model for name, _, model in pairs}

    @property
    def unstable_lines(self) -> tuple[str, ...]:
        """What is taken out of system texts."""
        return tuple(filter(None, (self.stable_prefix or "").split("\n")))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can come in."""
        if self.host == "localhost":
            return True
        import ipaddress  # noqa: PLC0415 - only a server asks

        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def keys_path(self, environ: Mapping[str, str] = os.environ) -> Path:
        """Where the keys are, or would be."""
        if self.keys_file is not None:
            return expanded(self.keys_file, "--keys-file to a full path")
        base = environ.get("XDG_CONFIG_HOME") or "~/.config"
        return expanded(base, "name the file with --keys-file") / "quire" / "keys.json"

    def check_keys_file(self) -> None:
        """A keys file that was named must be there: a typing error must not let everyone in."""
        if self.keys_file is not None and not self.keys_path().exists():
            raise ConfigError(
                f"keys_file must name a file that is there, {self.keys_path()} is not; "
                f"make it with: quire keys add NAME --keys-file {self.keys_path()}, or leave it out",
                ("keys_file",),
            )

    def admin_path(self, port: int, environ: Mapping[str, str] = os.environ) -> Path:
        """Where the admin socket of a server is that listens on this port."""
        if self.admin_socket is not None:
            return expanded(self.admin_socket, "--admin-socket to a full path")
        base = environ.get("XDG_RUNTIME_DIR") or environ.get("XDG_STATE_HOME") or "~/.local/state"
        return expanded(base, "name the socket with --admin-socket") / "quire" / f"admin-{port}.sock"

    def check_lock(self, *, has_keys: bool, allow_no_keys: bool) -> None:
        """Refuse to let a network in without keys, unless somebody wants exactly that."""
        if not (self.is_loopback or has_keys or allow_no_keys):
            raise ConfigError(
                f"host {self.host} lets other machines in, and there are no keys; make one with: quire keys add NAME, "
                "listen on 127.0.0.1, or say --insecure-no-keys if a lock of your own stands before this server",
                ("host",),
            )
