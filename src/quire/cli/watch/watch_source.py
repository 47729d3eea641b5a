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
from quire.http_client import OK, HttpClient, HttpServer, iterate

SILENCE_S = 20.0
"""Timeout of a silent stream; a server sends two events per second."""
MAX_EVENT_BYTES = 8_388_608
MAX_REASON_CHARS = 300
ADMIN_PREFIX = "/v1/admin"
REFUSALS = frozenset({400, 401, 403, 404, 405})
"""Status codes of permanent errors. Other errors may be temporary, because the server is starting, draining or full."""


class WatchGoneError(OSError):
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
    def server(self) -> HttpServer:
        """The server for the HTTP client; routes of the admin socket have no prefix."""
        server = server_at(self.url, self.key)
        return replace(server, path=ADMIN_PREFIX if self.socket_path is None else "", socket_path=self.socket_path)

    def snapshots(self, model: str | None = None) -> Generator[bytes, None, None]:
        """Yield snapshots as JSON. Raises RequestError if the server rejects the request, WatchGoneError at the end."""
        route = "/watch" if model is None else f"/watch?model={quote(model, safe='')}"
        try:
            yield from iterate(self._snapshots(route))
        except WatchGoneError:
            raise
        except (OSError, MessageError) as error:
            raise WatchGoneError(f"no snapshots of {self.url}: {error}") from error
        raise WatchGoneError("the server closed the stream")

    async def _snapshots(self, route: str) -> AsyncGenerator[bytes, None]:
        async with HttpClient(self.server, silence_s=SILENCE_S).request("GET", route) as response:
            if response.status != OK:
                raise _refusal(response.status, await response.whole())
            async for event in response.events(MAX_EVENT_BYTES):
                if event.name == b"snapshot":
                    yield event.data


def _refusal(status: int, body: bytes) -> Exception:
    refusal = response_error(status, body)
    reason = plain(str(refusal))[:MAX_REASON_CHARS]
    if status not in REFUSALS:
        return WatchGoneError(reason)
    if status in (401, 403):
        reason += "; pass an admin key with --key, or run this on the server's own machine"
    if status == 404:
        reason += "; an older server cannot be watched: update it, or choose another model"
    return RequestError(reason, code=refusal.code)


# -- choosing a server -------------------------------------------------------------------------------------------------


def chosen_source(server: str | None, key: str | None) -> WatchSource:
    """Select a server. This user's own servers need no key. Raises ConfigError for an invalid URL, or if `server` is
    None and not exactly one server of this user runs on this machine."""
    if server is None:
        return _only_one(running_servers())
    url = server_at(server).url
    own = None if key else next((one for one in running_servers() if server_at(one.url).url == url), None)
    return WatchSource(url, key=key) if own is None else WatchSource(url, own.socket_path)


def _only_one(found: list[FoundServer]) -> WatchSource:
    if not found:
        raise ConfigError(
            "no server of yours is running on this machine; start one with: quire serve MODEL, or name another one "
            "with --server URL --key KEY",
            code="no_server_running",
        )
    if len(found) > 1:
        urls = ", ".join(one.url for one in found)
        raise ConfigError(f"expected one running server, got {len(found)} ({urls}); choose one with --server")
    return WatchSource(found[0].url, found[0].socket_path)
