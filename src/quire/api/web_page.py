"""The web pages: `/`, a chat with the models, and `/dashboard`, where an operator monitors the server.

Each page has a few static files, read once and served without a key. The page requests its data from the API with its
user's key. Response headers forbid loading anything from other origins, inline scripts, and framing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
CSP = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": CSP,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
)


@dataclass(frozen=True)
class WebPage:
    """A web page: the files in its folder whose types are in MEDIA_TYPES."""

    folder: str
    """The folder in this package; files other than `index.html` are served below a path of the same name."""
    path: str
    """The path of `index.html`."""

    @property
    def names(self) -> tuple[str, ...]:
        names = (file.name for file in (files("quire.api") / self.folder).iterdir())
        return tuple(sorted(name for name in names if name.rpartition(".")[2] in MEDIA_TYPES))

    def path_of(self, name: str) -> str:
        """Return the URL path of a file."""
        return self.path if name == "index.html" else f"/{self.folder}/{name}"

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        return (files("quire.api") / self.folder / name).read_bytes()

    @cached_property
    def contents(self) -> Mapping[str, tuple[bytes, str]]:
        """Content and media type of each file by URL path. Read once."""
        return {self.path_of(name): (self.read(name), MEDIA_TYPES[name.rpartition(".")[2]]) for name in self.names}

    async def serve_file(self, request: Request) -> Response:
        """Return the file at the request's path."""
        body, media_type = self.contents[request.scope["path"]]
        return Response(body, media_type=media_type, headers=dict(HEADERS))


DASHBOARD = WebPage("dashboard", "/dashboard")
PAGES = (WebPage("page", "/"), DASHBOARD)
