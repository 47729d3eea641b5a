"""Which web pages may use this server. A browser sends requests on its user's behalf, from the user's own machine.

                     without keys                                     with keys
    Host             must be this server's own name or allowed        free: proxies stand before it
    Origin           none, the server's own, or allowed; else 403     free: no page can have the key
    Content-Type     none, or application/json; else 415              free
    CORS headers     for allowed origins only                         for allowed origins only

A client that sends no Origin is no web page: curl, SDKs, probes. A foreign name in Host means that another domain was
made to resolve to this server (DNS rebinding), which would let its page read responses as if they were its own.
"""

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass

from quire.api.http.errors import ApiError, shortened
from quire.api.http.headers import Headers

ANY = "*"
JSON = "application/json"
ANY_ADDRESS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - named, not listened on
METHODS = "GET, HEAD, POST, DELETE"
USUAL_HEADERS = "authorization, content-type, x-api-key, x-request-id, anthropic-version, anthropic-beta"
HEADER_NAMES = re.compile(r"[A-Za-z0-9_-]+( ?, ?[A-Za-z0-9_-]+)*")
PREFLIGHT_S = 600
VARY = (b"vary", b"origin")


@dataclass(frozen=True, slots=True)
class Origins:
    """The rules of one server."""

    bound: str = "127.0.0.1"
    """The address it listens on."""
    hosts: frozenset[str] = frozenset()
    """Its other names, without ports; `*`: any."""
    allowed: frozenset[str] = frozenset()
    """Origins whose pages may use it; `*`: any."""

    def check(self, headers: Headers) -> None:
        """Refuse what a foreign page could have sent. For servers without keys."""
        host = headers.get("host")
        if host is not None and not self._is_own(host):
            raise _forbidden("host", f"expected a Host of this server, got {shortened(host)}", "--allow-host NAME")
        origin = headers.get("origin")
        if origin is not None and not self.allows(origin) and not _is_same(origin, host):
            raise _forbidden("origin", f"expected an allowed Origin, got {shortened(origin)}", "--allow-origin ORIGIN")
        _check_type(headers.get("content-type"))

    def allows(self, origin: str) -> bool:
        """Whether its pages may use this server."""
        return ANY in self.allowed or origin.lower() in self.allowed

    def cors(self, headers: Headers) -> Iterator[tuple[bytes, bytes]]:
        """CORS headers of a response; none for origins that are not allowed.

        Never credentials: a key is sent by the page itself, and there is nothing here that a browser would add.
        """
        if self.allowed and ANY not in self.allowed:
            yield VARY
        origin = headers.get("origin")
        if origin is not None and self.allows(origin):
            yield b"access-control-allow-origin", (ANY if ANY in self.allowed else origin).encode("latin-1")
            yield b"access-control-expose-headers", b"*"

    def is_preflight(self, headers: Headers) -> bool:
        """Whether OPTIONS is the preflight of an allowed page; a browser sends no key with it."""
        origin = headers.get("origin")
        return "access-control-request-method" in headers and origin is not None and self.allows(origin)

    def preflight(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """What an allowed page may send: these methods, and whatever headers its client library has."""
        requested = headers.get("access-control-request-headers") or ""
        names = requested if HEADER_NAMES.fullmatch(requested) else USUAL_HEADERS
        return [
            (b"access-control-allow-methods", METHODS.encode()),
            (b"access-control-allow-headers", names.encode()),
            (b"access-control-max-age", str(PREFLIGHT_S).encode()),
        ]

    def _is_own(self, host: str) -> bool:
        name = _without_port(host).lower()
        if ANY in self.hosts or name in self.hosts or name in ("localhost", self.bound.lower()):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # Any domain can be made to resolve to this server, an address cannot; where it listens on all addresses, those
        # that lead here, directly or through a proxy, cannot be listed.
        return address.is_loopback or self.bound in ANY_ADDRESS


def _without_port(host: str) -> str:
    """The name in a Host header: `localhost` of `localhost:8000`, `::1` of `[::1]:8000`."""
    found = re.fullmatch(r"\[([^\]]*)\](?::\d*)?|([^:]*)(?::\d*)?", host.strip())
    return host if found is None else found[1] or found[2] or ""


def _is_same(origin: str, host: str | None) -> bool:
    """A page that this server, or the proxy before it, served itself."""
    scheme, _, rest = origin.lower().partition("://")
    return host is not None and scheme in ("http", "https") and rest == host.strip().lower()


def _check_type(content_type: str | None) -> None:
    """A page can post forms and text to any server without a preflight, JSON only to servers that allow it.

    No type at all is accepted: a page without one has sent its Origin, which was checked.
    """
    if content_type is None or content_type.partition(";")[0].strip().lower() == JSON:
        return
    message = (
        f"expected the header Content-Type: {JSON} at a server without keys, got {shortened(content_type)}; "
        "send it with the body"
    )
    raise ApiError(415, "unsupported_media_type", message)


def _forbidden(what: str, why: str, flag: str) -> ApiError:
    message = f"{why}; a server without keys rejects foreign web pages: start it with {flag}, or with keys"
    return ApiError(403, f"{what}_not_allowed", message)
