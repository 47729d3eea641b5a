"""What only the operator may do, on a socket of its own: see who is inside, end a request, forget the cache, drain.

Whoever may open the socket may do all of it: the file system is the lock.
"""

import asyncio
from dataclasses import asdict
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.access.admission import Doors
from quire.api.asgi import Entrance, allowed_methods, worded
from quire.api.http.errors import Refusal
from quire.api.server import Closing
from quire.errors import DrainingError


def make_admin(doors: Doors, closing: Closing) -> Entrance:
    """The operator's application."""
    desk = _Desk(doors, closing)
    routes = [
        Route("/stats", desk.stats, methods=["GET"]),
        Route("/requests", desk.requests, methods=["GET"]),
        Route("/requests/{request_id}", desk.end_request, methods=["DELETE"]),
        Route("/cache/clear", desk.clear_cache, methods=["POST"]),
        Route("/drain", desk.drain, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes, exception_handlers={Refusal: worded, HTTPException: _no_such_door, Exception: worded}
    )
    app.router.redirect_slashes = False
    return Entrance(app)


class _Desk:
    """The routes."""

    def __init__(self, doors: Doors, closing: Closing) -> None:
        self._doors = doors
        self._closing = closing

    async def stats(self, request: Request) -> Response:
        models = [
            {"name": model.name, "root": model.root, "is_ready": model.is_ready, "engine": _as_dict(model.stats())}
            for model in self._doors.models
        ]
        told = {"is_draining": self._doors.is_draining, "num_inside": len(self._doors.inside), "models": models}
        return _json({**told, "num_tasks": len(asyncio.all_tasks())})

    async def requests(self, request: Request) -> Response:
        told = [visit.line() | {"state": visit.state} for visit, _ in self._doors.inside.values()]
        return _json({"requests": told})

    async def end_request(self, request: Request) -> Response:
        found = self._doors.inside.get(request.path_params["request_id"])
        if found is None:
            raise Refusal(404, "not_found", "there is no such request; GET /requests lists them")
        found[0].end(DrainingError("the operator ended this request"))
        return _json({"ended": True})

    async def clear_cache(self, request: Request) -> Response:
        clears = [model.clear_cache for model in self._doors.models]
        if any(clear is None for clear in clears):
            raise Refusal(501, "not_implemented", "this engine's cache cannot be reached from here; restart instead")
        for clear in clears:
            if clear is not None:
                await clear()
        return _json({"cleared": True})

    async def drain(self, request: Request) -> Response:
        self._closing.ask()
        return _json({"is_draining": True, "num_inside": len(self._doors.inside)})


def _as_dict(stats: Any) -> dict[str, Any] | None:
    return asdict(stats) if stats is not None else None


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _no_such_door(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = allowed_methods(request)
        message = f"this door takes {allowed}, {request.method} given"
        return await worded(request, Refusal(405, "method_not_allowed", message, headers=(("allow", allowed),)))
    return await worded(request, Refusal(404, "not_found", "there is no such door; the guide lists them"))
