"""The page at `/` where people talk to models: a few files, the same for everybody, that hold nothing of anybody.

They are read once and served without a key; whatever the page shows it asks of the API, with the key of whoever sits
before it. A browser is told to load nothing from elsewhere, run nothing that stands in the page, and frame it nowhere.
"""

from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

FOLDER = files("quire.api") / "page"
KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
NAMES = ("index.html", "style.css", "icon.svg", "main.js", "server.js", "conversations.js", "markdown.js")
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


class WebPage:
    """The files by the path they are served at."""

    def __init__(self) -> None:
        self._answers = {
            path_of(name): ((FOLDER / name).read_bytes(), KINDS[name.rpartition(".")[2]]) for name in NAMES
        }

    @property
    def paths(self) -> tuple[str, ...]:
        """Where it is served."""
        return tuple(self._answers)

    async def answer(self, request: Request) -> Response:
        """A file of the page to talk to models."""
        body, kind = self._answers[request.scope["path"]]
        return Response(body, media_type=kind, headers=dict(HEADERS))


def path_of(name: str) -> str:
    """Where a file is served: the page itself at the top."""
    return "/" if name == "index.html" else f"/page/{name}"
