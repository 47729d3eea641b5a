"""The public routes. Each has a guard that admits callers; a route without a guard cannot be added.

The framework (Starlette) only selects the route. quire parses bodies and writes responses itself, so that it detects
disconnected clients and rejects invalid JSON. quire also generates `/openapi.json`.
"""

from collections.abc import Callable, Iterator, Mapping

import msgspec
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire import __version__
from quire.api.access.admission import Admission
from quire.api.access.auth import (
    Caller,
    Endpoint,
    Gate,
    Guard,
    GuardedRoute,
    GuardedRoutes,
    is_page_admitted,
    public,
    require_admin,
    require_key,
    require_token,
)
from quire.api.asgi import OnEnded, PageRules, RequestMiddleware, allowed_methods, error_response
from quire.api.dialects.answering import BodyEndpoint
from quire.api.dialects.anthropic.messages import AnthropicMessages, CountTokens
from quire.api.dialects.anthropic.schemas import CountFields, MessagesFields
from quire.api.dialects.openai.chat import Chat
from quire.api.dialects.openai.completions import Completions
from quire.api.dialects.openai.explain import ExplainBody, ExplainEndpoint
from quire.api.dialects.openai.kept_responses import delete_response, retrieve_response
from quire.api.dialects.openai.responses import Compact, Responses
from quire.api.dialects.openai.schemas import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    ResponseFields,
    TokenizeFields,
)
from quire.api.dialects.openai.tokens import Detokenize, Tokenize
from quire.api.http.errors import ApiError
from quire.api.http.limits import LOADING_RETRY_S
from quire.api.http.sse import json_response
from quire.api.openapi import openapi_document
from quire.api.prefix.routes import cache_warnings, retrieve_reuse
from quire.api.server_state import ServerState
from quire.api.watch.watch_routes import block_response, watch_response
from quire.api.web_page import PAGES, WebPage
from quire.errors import QuireError
from quire.observe.metrics import CONTENT_TYPE, ENGINE_TOTALS, ModelSnapshot

BodyRoute = tuple[str, str, Callable[[Admission], BodyEndpoint], type[BaseModel]]
"""The endpoint's name and description in `/openapi.json`, its factory, and the schema of its bodies."""
BODY_ROUTES: Mapping[str, BodyRoute] = {
    "/v1/chat/completions": ("_chat", "The next message of a conversation.", Chat, ChatFields),
    "/v1/completions": ("_completions", "The continuation of a prompt.", Completions, CompletionFields),
    "/v1/responses": ("_responses", "The next items of a conversation.", Responses, ResponseFields),
    "/v1/responses/compact": (
        "_compact",
        "A summary of a conversation, with which a client replaces it.",
        Compact,
        ResponseFields,
    ),
    "/v1/messages": (
        "_messages",
        "The next message of a conversation, in the format of the Anthropic API.",
        AnthropicMessages,
        MessagesFields,
    ),
    "/v1/messages/count_tokens": (
        "_count_tokens",
        "The number of tokens in a conversation, in the format of the Anthropic API.",
        CountTokens,
        CountFields,
    ),
    "/tokenize": ("_tokenize", "The token ids of a prompt or a conversation.", Tokenize, TokenizeFields),
    "/detokenize": ("_detokenize", "The text of token ids.", Detokenize, DetokenizeFields),
    "/v1/cache/explain": (
        "_explain",
        "How much of a prompt is in the cache, and why the next token is not. Nothing is computed.",
        ExplainEndpoint,
        ExplainBody,
    ),
}
BODY_SCHEMAS = {path: body for path, (*_, body) in BODY_ROUTES.items()}


def make_app(admission: ServerState, gate: Gate) -> Starlette:
    """Create the application with all public routes."""
    handlers = dict.fromkeys((ApiError, QuireError, Exception), error_response)
    app = Starlette(exception_handlers={HTTPException: _no_such_route, **handlers})
    app.router.redirect_slashes = False
    app.router.routes = GuardedRoutes()
    app.state.admission, app.state.gate = admission, gate
    admission.metrics.set_sources(lambda: model_pictures(admission), lambda: admission.work_spent().num_cut)
    for path, (name, docstring, make_endpoint, _) in BODY_ROUTES.items():
        add_route(app, "POST", path, _endpoint_of(make_endpoint(admission), name, docstring), require_key)
    _add_routes(app)
    if admission.settings.has_page:
        _add_undescribed(app, GuardedRoute("POST", "/v1/admin/session", _session, require_token))
        for page in PAGES:
            _add_page(app, page)
    return app


def make_asgi(admission: ServerState, gate: Gate, on_ended: OnEnded | None = None) -> RequestMiddleware:
    """Create the application with its middleware. `on_ended` is called with every finished request."""
    rules = PageRules(admission.settings.origins, gate.ring)
    return RequestMiddleware(make_app(admission, gate), admission.note_refusal, rules, on_ended=on_ended)


def add_route(app: Starlette, method: str, path: str, endpoint: Endpoint, guard: Guard) -> None:
    """Add a route with its guard; routes without a guard are rejected."""
    app.router.routes.append(GuardedRoute(method, path, endpoint, guard))


def _endpoint_of(body_endpoint: BodyEndpoint, name: str, docstring: str) -> Endpoint:
    async def endpoint(_request: Request) -> ASGIApp:
        return body_endpoint

    endpoint.__name__, endpoint.__doc__ = name, docstring
    return endpoint


def _add_routes(app: Starlette) -> None:
    add_route(app, "GET", "/v1/responses/{response_id}", retrieve_response, require_key)
    add_route(app, "DELETE", "/v1/responses/{response_id}", delete_response, require_key)
    add_route(app, "GET", "/v1/models", _models, require_key)
    add_route(app, "GET", "/v1/models/{name:path}", _model, require_key)
    add_route(app, "GET", "/v1/admin/watch", _watch, require_admin)
    add_route(app, "GET", "/v1/admin/blocks/{block}", _block, require_admin)
    add_route(app, "GET", "/v1/cache/warnings", cache_warnings, require_key)
    add_route(app, "GET", "/v1/requests/{request_id}/cache", retrieve_reuse, require_key)
    add_route(app, "GET", "/version", _version, require_key)
    add_route(app, "GET", "/metrics", _metrics, require_key)
    add_route(app, "GET", "/openapi.json", _openapi, require_key)
    for method in ("GET", "HEAD"):  # probes may use either
        add_route(app, method, "/health", _health, public)
        add_route(app, method, "/ready", _ready, public)


def _add_page(app: Starlette, page: WebPage) -> None:
    """Add the routes of a page's files, which are not part of the API and not in `/openapi.json`."""
    for path in page.contents:
        for method in ("GET", "HEAD"):
            _add_undescribed(app, GuardedRoute(method, path, page.serve_file, public))


def _add_undescribed(app: Starlette, route: GuardedRoute) -> None:
    """Add a route that only pages use, without an entry in `/openapi.json`."""
    route.include_in_schema = False
    app.router.routes.append(route)


async def _models(request: Request) -> Response:
    """The models of this server, including those that are still loading."""
    return json_response({"object": "list", "data": [model.card() for model in _admission(request).models]})


async def _model(request: Request, name: str) -> Response:
    """One model."""
    return json_response(_admission(request).models.named(name).card())


async def _watch(request: Request) -> Response:
    """A stream of events for the operator: the pool, running and waiting requests, and the last hour."""
    admission, caller = _admitted(request)
    is_page = is_page_admitted(request)
    # Without keys there is one tenant, so the caller may read all prompt lines.
    return watch_response(
        admission.watchers,
        request,
        includes_lines=caller.is_anonymous,
        is_over=lambda: is_page and not is_page_admitted(request),
    )


async def _session(request: Request) -> Response:
    """Exchange the token of a page that `quire dashboard` opened for a key. A token works once."""
    return json_response({"key": request.scope["quire.page_key"]})


async def _block(request: Request, block: str) -> Response:
    """The state of one block of the pool."""
    return await block_response(_admission(request).watchers, request)


async def _version(request: Request) -> Response:
    """The version."""
    return json_response({"version": __version__})


async def _metrics(request: Request) -> Response:
    """Metrics in the Prometheus text format."""
    return Response(_admission(request).metrics.page(), media_type=CONTENT_TYPE)


async def _openapi(request: Request) -> Response:
    """This description."""
    state = request.app.state
    # Cached, because creating it takes tens of milliseconds and clients may request it repeatedly.
    if not hasattr(state, "description"):
        state.description = msgspec.json.encode(openapi_document(request.app.routes, BODY_SCHEMAS))
    return Response(state.description, media_type="application/json")


async def _health(request: Request) -> Response:
    """Whether the server is alive."""
    is_dead = any(model.is_dead for model in _admission(request).models if model.is_required)
    return Response(status_code=503 if is_dead else 200, headers=_retry_header(is_dead))


async def _ready(request: Request) -> Response:
    """Whether the server is ready for requests."""
    is_ready = _admission(request).is_ready
    return Response(status_code=200 if is_ready else 503, headers=_retry_header(not is_ready))


def model_pictures(admission: ServerState) -> Iterator[ModelSnapshot]:
    """Yield the current state of each model, for the gauges in `/metrics`."""
    for model in admission.models:
        states = [record.state for record, _ in admission.open_requests.values() if record.model == model.name]
        num_running, stats = states.count("running"), model.stats()
        yield ModelSnapshot(
            model=model.name,
            num_running=num_running,
            num_waiting=len(states) - num_running,
            kv_usage=stats.kv_usage if stats else None,
            num_blocks=stats.num_blocks if stats else None,
            block_size=stats.block_size if stats else None,
            num_restarts=stats.num_restarts if stats else None,
            step_sizes=stats.step_sizes if stats else (),
            num_step_tokens=stats.num_step_tokens if stats else 0,
            totals=tuple((name, getattr(stats, name)) for name in ENGINE_TOTALS) if stats else (),
        )


def _admission(request: Request) -> ServerState:
    admission: ServerState = request.app.state.admission
    return admission


def _admitted(request: Request) -> tuple[ServerState, Caller]:
    """Return the server state, and the caller that the guard admitted."""
    return _admission(request), request.scope["quire.caller"]


def _retry_header(is_needed: bool) -> dict[str, str] | None:
    return {"retry-after": str(LOADING_RETRY_S)} if is_needed else None


async def _no_such_route(request: Request, error: Exception) -> Response:
    """Convert the framework's 404 and 405 errors to the error format of the API."""
    status = error.status_code if isinstance(error, HTTPException) else 400
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
    allowed = allowed_methods(request)
    message = f"no such route: {request.method} {request.scope['path'][:200]}"
    if status == 405:
        message = f"{message}; expected {allowed}"
    headers = (("allow", allowed),) if status == 405 else ()
    return await error_response(request, ApiError(status, code, message, headers=headers))
