"""What only the operator may do, on a socket of its own: see who is inside, end a request, load and unload
models, forget the cache, drain.

Whoever may open the socket may do all of it: the file system is the lock.
"""

import asyncio
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.access.admission import Admission
from quire.api.asgi import RequestMiddleware, allowed_methods, error_response
from quire.api.http.errors import ApiError
from quire.api.models.model_park import ModelPark
from quire.api.prefix.warnings import warnings_response
from quire.api.server import Shutdown
from quire.api.watch.watch_routes import block_answer, watching
from quire.errors import DrainingError


@dataclass(frozen=True, slots=True)
class PublicAddress:
    """Where the server listens for everybody else."""

    url: str
    is_locked: bool
    """A key is needed there."""


def make_admin(
    admission: Admission, shutdown: Shutdown, address: PublicAddress, park: ModelPark | None = None
) -> RequestMiddleware:
    """The operator's application."""
    desk = _Desk(admission, shutdown, address, park)
    routes = [
        Route("/stats", desk.stats, methods=["GET"]),
        Route("/requests", desk.requests, methods=["GET"]),
        Route("/requests/{request_id}", desk.end_request, methods=["DELETE"]),
        Route("/models/{name:path}/load", desk.load, methods=["POST"]),
        Route("/models/{name:path}/unload", desk.unload, methods=["POST"]),
        Route("/watch", desk.watch, methods=["GET"]),
        Route("/blocks/{block}", desk.block, methods=["GET"]),
        Route("/cache/warnings", desk.cache_warnings, methods=["GET"]),
        Route("/cache/clear", desk.clear_cache, methods=["POST"]),
        Route("/drain", desk.drain, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={ApiError: error_response, HTTPException: _no_such_route, Exception: error_response},
    )
    app.router.redirect_slashes = False
    return RequestMiddleware(app)


class _Desk:
    """The routes."""

    def __init__(
        self, admission: Admission, shutdown: Shutdown, address: PublicAddress, park: ModelPark | None
    ) -> None:
        self._admission = admission
        self._shutdown = shutdown
        self._address = address
        self._park = park

    async def stats(self, request: Request) -> Response:
        models = [
            {
                "name": model.name,
                "root": model.root,
                "is_ready": model.is_ready,
                "state": model.state,
                "max_model_len": model.card()["max_model_len"],
                "engine": _as_dict(model.stats()),
                "fleet": _as_dict(model.fleet_stats()),
            }
            for model in self._admission.models
        ]
        told = {
            "is_draining": self._admission.is_draining,
            "num_open_requests": len(self._admission.open_requests),
            "num_prompt_tokens": self._admission.metrics.num_prompt_tokens,
            "num_cached_tokens": self._admission.metrics.num_cached_tokens,
            **asdict(self._address),
            "misses": [asdict(miss) for miss in self._admission.reuse_log.misses(monotonic())],
            "work": asdict(self._admission.work_spent()),
            "models": models,
        }
        return _json({**told, "num_tasks": len(asyncio.all_tasks())})

    async def requests(self, request: Request) -> Response:
        told = [record.line() | {"state": record.state} for record, _ in self._admission.open_requests.values()]
        return _json({"requests": told})

    async def end_request(self, request: Request) -> Response:
        found = self._admission.open_requests.get(request.path_params["request_id"])
        if found is None:
            raise ApiError(404, "not_found", "there is no such request; GET /requests lists them")
        found[0].end(DrainingError("the operator ended this request"))
        return _json({"ended": True})

    async def watch(self, request: Request) -> Response:
        return watching(self._admission, request, reads_lines=True)

    async def block(self, request: Request) -> Response:
        return await block_answer(self._admission, request)

    async def load(self, request: Request) -> Response:
        model = self._admission.models.named(request.path_params["name"])
        if self._park is not None:
            await self._park.load(model)
        return _json({"name": model.name, "state": model.state})

    async def unload(self, request: Request) -> Response:
        model = self._admission.models.named(request.path_params["name"])
        if self._park is None:
            raise ApiError(400, "invalid_request", "the models of this server are here for good")
        self._park.unload(model)
        return _json({"name": model.name, "state": model.state})

    async def cache_warnings(self, request: Request) -> Response:
        return warnings_response(self._admission.prefix_guard.warnings(monotonic(), reads_lines=True))

    async def clear_cache(self, request: Request) -> Response:
        for model in self._admission.models:
            if model.engine_client is not None:
                model.engine_client.clear_cache()
        return _json({"cleared": True})

    async def drain(self, request: Request) -> Response:
        self._shutdown.request()
        return _json({"is_draining": True, "num_open_requests": len(self._admission.open_requests)})


def _as_dict(stats: Any) -> dict[str, Any] | None:
    return asdict(stats) if stats is not None else None


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _no_such_route(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = allowed_methods(request)
        message = f"this route takes {allowed}, {request.method} given"
        return await error_response(
            request, ApiError(405, "method_not_allowed", message, headers=(("allow", allowed),))
        )
    return await error_response(request, ApiError(404, "not_found", "there is no such route; the guide lists them"))
