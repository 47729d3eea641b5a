"""Rules for web pages that use this server: browsers send requests of foreign pages, too, from their user's machine.

                     without keys                                       with keys
    Host             this server's own name, or allowed; else 403       any, because of reverse proxies
    Origin           none, the server's own, or allowed; else 403       any, because a foreign page has no key
    Content-Type     none, or application/json; else 415                any
    CORS headers     for allowed origins only                           for allowed origins only

Clients without an Origin header are not web pages, but curl, SDKs or probes. A foreign name in Host means that another
domain resolves to this server (DNS rebinding), which would let pages of that domain read responses.
"""

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass

from quire.api.http.errors import ApiError, shortened
from quire.api.http.request_record import Headers

ANY = "*"
JSON = "application/json"
ANY_ADDRESS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - only compared, not listened on
METHODS = "GET, HEAD, POST, DELETE"
COMMON_HEADERS = "authorization, content-type, x-api-key, x-request-id, anthropic-version, anthropic-beta"
HEADER_NAMES = re.compile(r"[A-Za-z0-9_-]+( ?, ?[A-Za-z0-9_-]+)*")
PREFLIGHT_S = 600
VARY = (b"vary", b"origin")


@dataclass(frozen=True, slots=True)
class Origins:
    """The allowed hosts and origins of one server."""

    bound: str = "127.0.0.1"
    """The address on which the server listens."""
    hosts: frozenset[str] = frozenset()
    """Further names of the server, without ports; `*`: any."""
    allowed: frozenset[str] = frozenset()
    """Origins whose pages may use the server; `*`: any."""

    def check(self, headers: Headers) -> None:
        """Raise ApiError for a request that a foreign page could have sent. For servers without keys."""
        host = headers.get("host")
        if host is not None and not self._is_own(host):
            raise _forbidden("host", f"expected a Host of this server, got {shortened(host)}", "--allow-host NAME")
        origin = headers.get("origin")
        if origin is not None and not self.allows(origin) and not _is_same_origin(origin, host):
            raise _forbidden("origin", f"expected an allowed Origin, got {shortened(origin)}", "--allow-origin ORIGIN")
        _check_type(headers.get("content-type"))

    def allows(self, origin: str) -> bool:
        """Return whether pages of this origin may use the server."""
        return ANY in self.allowed or origin.lower() in self.allowed

    def cors(self, headers: Headers) -> Iterator[tuple[bytes, bytes]]:
        """Yield the CORS headers of a response; none for origins that are not allowed.

        Credentials are never allowed, because pages send the key themselves and the server uses no cookies.
        """
        if self.allowed and ANY not in self.allowed:
            yield VARY
        origin = headers.get("origin")
        if origin is not None and self.allows(origin):
            yield b"access-control-allow-origin", (ANY if ANY in self.allowed else origin).encode("latin-1")
            yield b"access-control-expose-headers", b"*"

    def is_preflight(self, headers: Headers) -> bool:
        """Return whether an OPTIONS request is the CORS preflight of an allowed page; preflights carry no key."""
        origin = headers.get("origin")
        return "access-control-request-method" in headers and origin is not None and self.allows(origin)

    def preflight(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return the headers of a preflight response: allowed methods, and all header names that the page requests."""
        requested = headers.get("access-control-request-headers") or ""
        names = requested if HEADER_NAMES.fullmatch(requested) else COMMON_HEADERS
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
        # Addresses are accepted, because only domain names can be rebound. A server that listens on all addresses
        # accepts any address: those that lead to it, also through proxies, cannot be listed.
        return address.is_loopback or self.bound in ANY_ADDRESS


def _without_port(host: str) -> str:
    """Return the name in a Host header: `localhost` for `localhost:8000`, `::1` for `[::1]:8000`."""
    match = re.fullmatch(r"\[([^\]]*)\](?::\d*)?|([^:]*)(?::\d*)?", host.strip())
    return host if match is None else match[1] or match[2] or ""


def _is_same_origin(origin: str, host: str | None) -> bool:
    """Return whether the page was served by this server, or by the proxy in front of it."""
    scheme, _, authority = origin.lower().partition("://")
    return host is not None and scheme in ("http", "https") and authority == host.strip().lower()


def _check_type(content_type: str | None) -> None:
    """Raise ApiError for forms and plain text, which a page can post to any server without a preflight, unlike JSON.

    A missing type is accepted: a page that sends none has sent its Origin, which was checked.
    """
    if content_type is None or content_type.partition(";")[0].strip().lower() == JSON:
        return
    message = (
        f"expected the header Content-Type: {JSON} at a server without keys, got {shortened(content_type)}; "
        "send it with the body"
    )
    raise ApiError(415, "unsupported_media_type", message)


def _forbidden(header: str, reason: str, flag: str) -> ApiError:
    message = f"{reason}; a server without keys rejects foreign web pages: start it with {flag}, or with keys"
    return ApiError(403, f"{header}_not_allowed", message)
