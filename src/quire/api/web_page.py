"""The pages: `/`, a chat with the models, and `/dashboard`, where an operator monitors the server.

Each is a few files, the same for all clients and without data. They are read once and served without a key; a page
requests what it shows from the API, with its user's key. Headers forbid a browser to load anything from elsewhere, to
run inline scripts, and to frame the page.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = "; ".join(
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
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
)


@dataclass(frozen=True, slots=True)
class PageFiles:
    """What a page is made of. A file that is not named here is not served."""

    folder: str
    """Beside this module; the page's other files are served below a path of the same name."""
    path: str
    """Where `index.html` is served."""
    names: tuple[str, ...]

    def path_of(self, name: str) -> str:
        """Where a file is served."""
        return self.path if name == "index.html" else f"/{self.folder}/{name}"

    def read(self, name: str) -> bytes:
        """A file as it is sent."""
        return (files("quire.api") / self.folder / name).read_bytes()


CHAT = PageFiles(
    "page", "/", ("index.html", "style.css", "icon.svg", "main.js", "server.js", "conversations.js", "markdown.js")
)
DASHBOARD = PageFiles(
    "dashboard",
    "/dashboard",
    (
        *("index.html", "style.css", "icon.svg", "main.js", "watch.js", "store.js", "words.js", "palette.js"),
        *("canvas.js", "cells.js", "pool.js", "block.js", "branches.js", "tree.js", "charts.js", "timeline.js"),
        *("lanes.js", "tables.js"),
    ),
)
PAGES = (CHAT, DASHBOARD)


class WebPage:
    """The files of a page by the path they are served at."""

    def __init__(self, page: PageFiles) -> None:
        self._answers = {page.path_of(name): (page.read(name), KINDS[name.rpartition(".")[2]]) for name in page.names}

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self._answers)

    async def answer(self, request: Request) -> Response:
        """A file of a page for a browser."""
        body, kind = self._answers[request.scope["path"]]
        return Response(body, media_type=kind, headers=dict(HEADERS))
