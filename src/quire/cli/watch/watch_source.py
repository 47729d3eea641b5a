"""Where `quire top` and `quire dashboard` read from: a server's admin socket, or its URL with an admin key. Reads the
watch stream, one connection at a time, bounded and on demand.
"""

from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from quire.cli.chat.remote import refusal_reason, server_at
from quire.cli.shared.columns import plain
from quire.cli.shared.found_servers import FoundServer, running_servers
from quire.errors import ConfigError, MessageError, RequestError
from quire.http_client import OK, HttpClient, HttpServer, iterate

SILENCE_S = 20.0
"""A stream that is silent for so long is dead: the server sends twice a second."""
MAX_EVENT_BYTES = 8_388_608
MAX_REASON_CHARS = 300
ADMIN_PREFIX = "/v1/admin"
REFUSALS = frozenset({400, 401, 403, 404, 405})
"""Permanent errors; others may be temporary: the server is starting, draining or full."""


class WatchGoneError(OSError):
    """The stream broke or is unavailable; a retry may succeed."""


@dataclass(frozen=True, slots=True)
class WatchSource:
    """One server, and how to reach its admin routes."""

    url: str
    """The public URL."""
    socket_path: Path | None = None
    """The admin socket; None: use the URL and a key."""
    key: str | None = None

    @property
    def server(self) -> HttpServer:
        """For the HTTP client; the admin socket's routes have no prefix."""
        server = server_at(self.url, self.key)
        return replace(server, path=ADMIN_PREFIX if self.socket_path is None else "", socket_path=self.socket_path)

    def snapshots(self, model: str | None = None) -> Generator[bytes, None, None]:
        """Snapshots as JSON. Raises RequestError if the server rejects the request, else WatchGoneError at the end."""
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
    reason = plain(refusal_reason(status, body))[:MAX_REASON_CHARS]
    if status in (401, 403):
        return RequestError(f"{reason}; pass an admin key with --key, or run this on the server's own machine")
    if status == 404:
        return RequestError(f"{reason}; an older server cannot be watched: update it, or choose another model")
    return RequestError(reason) if status in REFUSALS else WatchGoneError(reason)


# -- choosing one ------------------------------------------------------------------------------------------------------


def chosen_source(server: str | None, key: str | None) -> WatchSource:
    """The selected server. This user's own servers on this machine need no key. Raises ConfigError."""
    if server is None:
        return _only_one(running_servers())
    url = server_at(server).url
    own = None if key else next((one for one in running_servers() if server_at(one.url).url == url), None)
    return WatchSource(url, key=key) if own is None else WatchSource(url, own.socket_path)


def _only_one(found: list[FoundServer]) -> WatchSource:
    if not found:
        raise ConfigError(
            "no server of yours is running on this machine; start one with: quire serve MODEL, or name another one "
            "with --server URL --key KEY"
        )
    if len(found) > 1:
        urls = ", ".join(one.url for one in found)
        raise ConfigError(f"expected one running server, got {len(found)} ({urls}); choose one with --server")
    return WatchSource(found[0].url, found[0].socket_path)
