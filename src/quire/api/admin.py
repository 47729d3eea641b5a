"""The operator's routes, on a separate Unix socket: list and end open requests, load and unload models, clear the
cache, drain.

The file permissions of the socket control access: a process that can connect may use all routes.
"""

import asyncio
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.asgi import RequestMiddleware, allowed_methods, error_response
from quire.api.http.errors import ApiError
from quire.api.http.sse import json_response
from quire.api.models.model_park import ModelManager
from quire.api.prefix.warnings import warnings_response
from quire.api.server import Shutdown
from quire.api.server_state import ServerState
from quire.api.watch.watch_routes import block_response, watch_response
from quire.errors import DrainingError


@dataclass(frozen=True, slots=True)
class PublicAddress:
    """The address on which the server listens for clients."""

    url: str
    is_locked: bool
    """Whether clients need an API key."""


def make_admin(
    admission: ServerState, shutdown: Shutdown, address: PublicAddress, models: ModelManager
) -> RequestMiddleware:
    """Create the ASGI application of the admin socket."""
    endpoints = _AdminEndpoints(admission, shutdown, address, models)
    routes = [
        Route("/stats", endpoints.stats, methods=["GET"]),
        Route("/requests", endpoints.requests, methods=["GET"]),
        Route("/requests/{request_id}", endpoints.end_request, methods=["DELETE"]),
        Route("/models/{name:path}/load", endpoints.load, methods=["POST"]),
        Route("/models/{name:path}/unload", endpoints.unload, methods=["POST"]),
        Route("/watch", endpoints.watch, methods=["GET"]),
        Route("/blocks/{block}", endpoints.block, methods=["GET"]),
        Route("/cache/warnings", endpoints.cache_warnings, methods=["GET"]),
        Route("/cache/clear", endpoints.clear_cache, methods=["POST"]),
        Route("/dashboard", endpoints.dashboard, methods=["POST"]),
        Route("/drain", endpoints.drain, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={ApiError: error_response, HTTPException: _no_such_route, Exception: error_response},
    )
    app.router.redirect_slashes = False
    return RequestMiddleware(app)


@dataclass(frozen=True, slots=True)
class _AdminEndpoints:
    _admission: ServerState
    _shutdown: Shutdown
    _address: PublicAddress
    _models: ModelManager

    async def stats(self, request: Request) -> Response:
        models = [
            {
                "name": model.name,
                "root": model.root,
                "is_ready": model.is_ready,
                "state": model.state,
                "max_model_len": model.card()["max_model_len"],
                "load_progress": _as_dict(model.load_progress),
                "engine": _as_dict(model.stats()),
                "fleet": _as_dict(model.fleet_stats()),
            }
            for model in self._models
        ]
        server = {
            "is_draining": self._admission.is_draining,
            "num_open_requests": len(self._admission.open_requests),
            "num_prompt_tokens": self._admission.metrics.num_prompt_tokens,
            "num_cached_tokens": self._admission.metrics.num_cached_tokens,
            "served": asdict(self._admission.metrics.served),
            **asdict(self._address),
            "misses": [asdict(miss) for miss in self._admission.reuse_log.misses(monotonic())],
            "work": asdict(self._admission.work_spent()),
            "models": models,
        }
        return json_response({**server, "num_tasks": len(asyncio.all_tasks())})

    async def requests(self, request: Request) -> Response:
        lines = [record.line() | {"state": record.state} for record, _ in self._admission.open_requests.values()]
        return json_response({"requests": lines})

    async def end_request(self, request: Request) -> Response:
        entry = self._admission.open_requests.get(request.path_params["request_id"])
        if entry is None:
            raise ApiError(404, "not_found", "no such request; GET /requests lists the open requests")
        entry[0].end(DrainingError("the operator ended this request"))
        return json_response({"ended": True})

    async def watch(self, request: Request) -> Response:
        return watch_response(self._admission.watchers, request, includes_lines=True)

    async def block(self, request: Request) -> Response:
        return await block_response(self._admission.watchers, request)

    async def load(self, request: Request) -> Response:
        model = self._models.named(request.path_params["name"])
        await self._models.load(model)
        return json_response({"name": model.name, "state": model.state})

    async def unload(self, request: Request) -> Response:
        model = self._models.named(request.path_params["name"])
        self._models.unload(model)
        return json_response({"name": model.name, "state": model.state})

    async def cache_warnings(self, request: Request) -> Response:
        return warnings_response(self._admission.prefix_guard.warnings(monotonic(), includes_lines=True))

    async def clear_cache(self, request: Request) -> Response:
        for model in self._models:
            if model.engine_client is not None:
                model.engine_client.clear_cache()
        return json_response({"cleared": True})

    async def dashboard(self, request: Request) -> Response:
        if not self._admission.settings.has_page:
            raise ApiError(400, "invalid_request", "this server has no pages; start it without --no-page")
        return json_response({"token": self._admission.page_sessions.make_token(monotonic())})

    async def drain(self, request: Request) -> Response:
        self._shutdown.request()
        return json_response({"is_draining": True, "num_open_requests": len(self._admission.open_requests)})


def _as_dict(stats: Any) -> dict[str, Any] | None:
    return asdict(stats) if stats is not None else None


async def _no_such_route(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = allowed_methods(request)
        message = f"expected {allowed}, got {request.method}"
        return await error_response(
            request, ApiError(405, "method_not_allowed", message, headers=(("allow", allowed),))
        )
    return await error_response(request, ApiError(404, "not_found", "no such route; the guide lists all routes"))
