"""The source of `quire top` and `quire dashboard`: a server's admin socket, or its URL with an admin key. Snapshots are
read from the server's watch stream, on demand and with bounded size, over one connection at a time.
"""

from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from quire.cli.chat.remote import response_error, server_at
from quire.cli.shared.columns import plain
from quire.cli.shared.found_servers import FoundServer, running_servers
from quire.errors import ConfigError, MessageError, RequestError
from quire.http_client import OK, HttpClient, ServerAddress, iterate

READ_TIMEOUT_S = 20.0
"""Longest wait for the next bytes of a stream; a server sends two events per second."""
MAX_EVENT_BYTES = 8_388_608
MAX_REASON_CHARS = 300
ADMIN_PREFIX = "/v1/admin"
PERMANENT_STATUSES = frozenset({400, 401, 403, 404, 405})
"""Status codes of permanent errors. Other errors may be temporary: the server may be starting, draining or full."""


class WatchError(OSError):
    """The watch stream broke or is unavailable; a retry may succeed."""


@dataclass(frozen=True, slots=True)
class WatchSource:
    """Address and credentials of one server's admin routes."""

    url: str
    """The server's public URL."""
    socket_path: Path | None = None
    """The admin socket; None: use the URL and a key."""
    key: str | None = None

    @property
    def server(self) -> ServerAddress:
        """The address for the HTTP client; routes of the admin socket have no prefix."""
        server = server_at(self.url, self.key)
        return replace(server, path=ADMIN_PREFIX if self.socket_path is None else "", socket_path=self.socket_path)

    def snapshots(self, model: str | None = None) -> Generator[bytes, None, None]:
        """Yield snapshots as JSON. Raises RequestError if the server rejects the request, WatchError at the end."""
        route = "/watch" if model is None else f"/watch?model={quote(model, safe='')}"
        try:
            yield from iterate(self._snapshots(route))
        except WatchError:
            raise
        except (OSError, MessageError) as error:
            raise WatchError(f"no snapshots from {self.url}: {error}") from error
        raise WatchError("the server closed the stream")

    async def _snapshots(self, route: str) -> AsyncGenerator[bytes, None]:
        async with HttpClient(self.server, read_s=READ_TIMEOUT_S).request("GET", route) as response:
            if response.status != OK:
                raise _refusal(response.status, await response.read_all())
            async for event in response.events(MAX_EVENT_BYTES):
                if event.name == b"snapshot":
                    yield event.data


def _refusal(status: int, body: bytes) -> Exception:
    refusal = response_error(status, body)
    reason = plain(str(refusal))[:MAX_REASON_CHARS]
    if status not in PERMANENT_STATUSES:
        return WatchError(reason)
    if status in (401, 403):
        reason += "; pass an admin key with --key, or run this on the server's own machine"
    if status == 404:
        reason += "; a server of an older version cannot be watched: update it, or choose another model"
    return RequestError(reason, code=refusal.code)


# -- choosing a server -------------------------------------------------------------------------------------------------


def choose_source(server: str | None, key: str | None) -> WatchSource:
    """Select a server. This user's own servers need no key. Raises ConfigError for an invalid URL, or if `server` is
    None and not exactly one server of this user runs on this machine."""
    if server is None:
        return _source_of_only(running_servers())
    url = server_at(server).url
    local = None if key else next((running for running in running_servers() if server_at(running.url).url == url), None)
    return WatchSource(url, key=key) if local is None else WatchSource(url, local.socket_path)


def _source_of_only(servers: list[FoundServer]) -> WatchSource:
    if not servers:
        raise ConfigError(
            "no server of yours is running on this machine; start one with: quire serve MODEL, or select "
            "another server with --server URL --key KEY",
            code="no_server_running",
        )
    if len(servers) > 1:
        urls = ", ".join(server.url for server in servers)
        raise ConfigError(f"expected one running server, got {len(servers)} ({urls}); choose one with --server")
    return WatchSource(servers[0].url, servers[0].socket_path)
