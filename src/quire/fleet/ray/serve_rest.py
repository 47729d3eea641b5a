"""Ray's own HTTP interface, as far as a fleet needs it: read what is deployed, and deploy. Imports no ray.

Every call carries the cluster's token: without one, any client that reaches that address can run any code there.
"""

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.config.home import expanded
from quire.errors import ConfigError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
APPLICATIONS = "/api/serve/applications/"
TOKEN, TOKEN_PATH, AUTH_MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"
TIMEOUT_S = 60.0
OK = 200
NO_TOKEN = (401, 403)


class RayUnreachableError(ConfigError):
    """The server at a cluster's address does not respond."""


def token_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where Ray reads the token on this machine."""
    return expanded(environ.get(TOKEN_PATH) or "~/.ray/auth_token", f"set {TOKEN_PATH} to a full path")


def read_token(environ: Mapping[str, str] = os.environ) -> str:
    """The cluster's token, as Ray finds it; empty if there is none."""
    if environ.get(TOKEN):
        return environ[TOKEN].strip()
    try:
        return token_file(environ).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def made_token(environ: Mapping[str, str] = os.environ) -> str:
    """The token, made now if there is none: in a file that its owner alone can read."""
    if token := read_token(environ):
        return token
    file = token_file(environ)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"Ray's token cannot be kept in {file}: {error.strerror}; set {TOKEN_PATH}") from error
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        out.write(secrets.token_hex(32))
    return read_token(environ)


@dataclass(frozen=True, slots=True)
class ServeRest:
    """One cluster."""

    address: str = DEFAULT_ADDRESS
    token: str = field(default="", repr=False)

    def details(self) -> dict[str, Any]:
        """Everything that is deployed. Raises RayUnreachableError if the cluster does not respond."""
        return dict(json.loads(self._fetch("GET") or "{}"))

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Deploy a config; applications that it does not name are ended."""
        self._fetch("PUT", json.dumps(config))

    def _fetch(self, method: str, body: str | None = None) -> str:
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"a cluster's address is that of its dashboard, as {DEFAULT_ADDRESS}, {self.address!r} given"
            )
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, APPLICATIONS, body, headers)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, HTTPException) as error:
            raise RayUnreachableError(
                f"a fleet on Ray needs a cluster, nobody answers at {self.address}: {error}; "
                "start one with `quire fleet ray up`, or name it with --address"
            ) from error
        finally:
            connection.close()
        if answer.status in NO_TOKEN:
            raise ConfigError(
                f"the cluster at {self.address} wants its token, {'another' if self.token else 'none'} given; "
                f"put it into {TOKEN} or {TOKEN_PATH}"
            )
        if answer.status != OK:
            raise ConfigError(f"the cluster at {self.address} refused {method}: {answer.status} {text[:2000]}")
        return text
