"""The public routes. Each is added with its guard; one without cannot be added.

The framework only finds the route. quire reads bodies strictly and writes responses itself, so it detects a client that
disconnects; it also writes `/openapi.json`.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from quire import __version__
from quire.api.access.auth import Caller, Gate, is_page_admitted, public, require_admin, require_key, require_token
from quire.api.asgi import OnEnded, Pages, RequestMiddleware, allowed_methods, error_response
from quire.api.dialects.answering import GenerationResponse, TextResponse
from quire.api.dialects.anthropic.messages import AnthropicMessages, count_tokens
from quire.api.dialects.anthropic.names import COUNT_NAMES
from quire.api.dialects.anthropic.schemas import CountFields, MessagesFields
from quire.api.dialects.openai.chat import Chat
from quire.api.dialects.openai.completions import Completions
from quire.api.dialects.openai.explain import ExplainBody, Explaining
from quire.api.dialects.openai.fields import DETOKENIZE_NAMES, TOKENIZE_NAMES
from quire.api.dialects.openai.kept_responses import delete_response, retrieve_response
from quire.api.dialects.openai.responses import Responses
from quire.api.dialects.openai.schemas import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    ResponseFields,
    TokenizeFields,
)
from quire.api.dialects.openai.tokens import detokenize, tokenize
from quire.api.http.errors import ApiError
from quire.api.http.limits import LOADING_RETRY_S
from quire.api.openapi import Operation, description
from quire.api.prefix.routes import cache_warnings, retrieve_reuse
from quire.api.server_state import ServerState
from quire.api.watch.watch_routes import block_answer, watching
from quire.api.web_page import PAGES, PageFiles, WebPage
from quire.errors import InvariantError, QuireError
from quire.observe.metrics import CONTENT_TYPE, ENGINE_TOTALS, Picture

Endpoint = Callable[..., Awaitable[Response]]
Guard = Callable[[Request], Awaitable[object]]
"""Admits a request, or raises."""


class GuardedRoute(Route):
    """A route whose guard runs first."""

    def __init__(self, method: str, path: str, endpoint: Endpoint, guard: Guard) -> None:
        async def handle(request: Request) -> Response:
            await guard(request)
            return await endpoint(request, **request.path_params)

        super().__init__(path, handle, methods=[method], include_in_schema=method != "HEAD")
        self.methods = {method}  # the framework accepts HEAD wherever GET is
        self.endpoint = endpoint
        self.guard = guard


class GuardedRoutes(list[BaseRoute]):
    """The routes of an application. Whichever way the framework adds one, it is appended here."""

    def append(self, route: BaseRoute) -> None:
        """Add a route that has a guard. Raises InvariantError for one without."""
        if not isinstance(route, GuardedRoute):
            path = getattr(route, "path", route)
            raise InvariantError(f"expected one guard for a route, {path} has 0; add it with add_route")
        super().append(route)


def make_app(admission: ServerState, gate: Gate) -> Starlette:
    """All public routes."""
    handlers = dict.fromkeys((ApiError, QuireError, Exception), error_response)
    app = Starlette(exception_handlers={HTTPException: _no_such_route, **handlers})
    app.router.redirect_slashes = False
    app.router.routes = GuardedRoutes()
    app.state.admission, app.state.gate, settings = admission, gate, admission.settings
    app.state.chat, app.state.responses = Chat(settings), Responses(settings)
    app.state.messages, app.state.completions = AnthropicMessages(settings), Completions()
    admission.metrics.watch(lambda: pictures(admission), lambda: admission.work_spent().num_cut)
    _add_routes(app)
    if admission.settings.has_page:
        _add_undescribed(app, GuardedRoute("POST", "/v1/admin/session", _session, require_token))
        for page in PAGES:
            _add_page(app, page)
    return app


def make_asgi(admission: ServerState, gate: Gate, ended: OnEnded | None = None) -> RequestMiddleware:
    """The application as a server runs it; `ended` is called with every request that is over."""
    pages = Pages(admission.settings.origins, gate.ring)
    return RequestMiddleware(make_app(admission, gate), admission.note_refusal, pages, ended=ended)


def add_route(app: Starlette, method: str, path: str, endpoint: Endpoint, guard: Guard) -> None:
    """A route with its guard. There is no other way to add one."""
    app.router.routes.append(GuardedRoute(method, path, endpoint, guard))


def _add_routes(app: Starlette) -> None:
    add_route(app, "POST", "/v1/chat/completions", _chat, require_key)
    add_route(app, "POST", "/v1/completions", _completions, require_key)
    add_route(app, "POST", "/v1/responses", _responses, require_key)
    add_route(app, "GET", "/v1/responses/{response_id}", retrieve_response, require_key)
    add_route(app, "DELETE", "/v1/responses/{response_id}", delete_response, require_key)
    add_route(app, "POST", "/v1/messages", _messages, require_key)
    add_route(app, "POST", "/v1/messages/count_tokens", _count_tokens, require_key)
    add_route(app, "GET", "/v1/models", _models, require_key)
    add_route(app, "GET", "/v1/models/{name:path}", _model, require_key)
    add_route(app, "POST", "/tokenize", _tokenize, require_key)
    add_route(app, "POST", "/detokenize", _detokenize, require_key)
    add_route(app, "POST", "/v1/cache/explain", _explain, require_key)
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


def _add_page(app: Starlette, files: PageFiles) -> None:
    """Files, and no part of the API: they are not described."""
    page = WebPage(files)
    for path in page.paths:
        for method in ("GET", "HEAD"):
            _add_undescribed(app, GuardedRoute(method, path, page.answer, public))


def _add_undescribed(app: Starlette, route: GuardedRoute) -> None:
    """A route that pages alone use."""
    route.include_in_schema = False
    app.router.routes.append(route)


BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatFields,
    "/v1/completions": CompletionFields,
    "/v1/responses": ResponseFields,
    "/v1/messages": MessagesFields,
    "/v1/messages/count_tokens": CountFields,
    "/tokenize": TokenizeFields,
    "/detokenize": DetokenizeFields,
    "/v1/cache/explain": ExplainBody,
}


async def _chat(request: Request) -> Response:
    """The next message of a conversation."""
    return GenerationResponse(*_admitted(request), request.app.state.chat)


async def _completions(request: Request) -> Response:
    """The continuation of a prompt."""
    return GenerationResponse(*_admitted(request), request.app.state.completions)


async def _responses(request: Request) -> Response:
    """The next items of a conversation."""
    return GenerationResponse(*_admitted(request), request.app.state.responses)


async def _messages(request: Request) -> Response:
    """The next message of a conversation, in the format of the Anthropic API."""
    return GenerationResponse(*_admitted(request), request.app.state.messages)


async def _count_tokens(request: Request) -> Response:
    """The number of tokens in a conversation, in the format of the Anthropic API."""
    return TextResponse(*_admitted(request), COUNT_NAMES, count_tokens)


async def _models(request: Request) -> Response:
    """The models of this server, including those that are still loading."""
    return _json({"object": "list", "data": [model.card() for model in _admission(request).models]})


async def _model(request: Request, name: str) -> Response:
    """One model."""
    return _json(_admission(request).models.named(name).card())


async def _tokenize(request: Request) -> Response:
    """The token ids of a prompt or a conversation."""
    return TextResponse(*_admitted(request), TOKENIZE_NAMES, tokenize)


async def _detokenize(request: Request) -> Response:
    """The text of token ids."""
    return TextResponse(*_admitted(request), DETOKENIZE_NAMES, detokenize)


async def _explain(request: Request) -> Response:
    """How much of a prompt is in the cache, and why the next token is not. Nothing is computed."""
    return Explaining(*_admitted(request))


async def _watch(request: Request) -> Response:
    """A stream of events for the operator: the pool, running and waiting requests, and the last hour."""
    admission, caller = _admitted(request)
    is_of_page = is_page_admitted(request)
    # Without keys all prompts are of one tenant.
    return watching(
        admission,
        request,
        reads_lines=caller.is_anonymous,
        is_over=lambda: is_of_page and not is_page_admitted(request),
    )


async def _session(request: Request) -> Response:
    """Exchange the token of `quire dashboard` for a key of the page that it opened. A token works once."""
    return _json({"key": request.scope["quire.page_key"]})


async def _block(request: Request, block: str) -> Response:
    """The state of one block of the pool."""
    return await block_answer(_admission(request), request)


async def _version(request: Request) -> Response:
    """The version."""
    return _json({"version": __version__})


async def _metrics(request: Request) -> Response:
    """Metrics in the Prometheus text format."""
    return Response(_admission(request).metrics.page(), media_type=CONTENT_TYPE)


async def _openapi(request: Request) -> Response:
    """This description."""
    state = request.app.state
    # Made once: it takes tens of milliseconds, and any client may request it again and again.
    if not hasattr(state, "description"):
        state.description = msgspec.json.encode(description(_operations(request.app.routes)))
    return Response(state.description, media_type="application/json")


def _operations(routes: Iterable[GuardedRoute]) -> Iterator[Operation]:
    """The operations to describe. HEAD is left out: it is GET without the body."""
    for route in routes:
        for method in route.methods or () if route.include_in_schema else ():
            yield Operation(
                method,
                route.path_format,
                route.endpoint.__name__,
                inspect.getdoc(route.endpoint) or "",
                is_public=route.guard is public,
                is_admin=route.guard is require_admin,
                body=BODIES.get(route.path),
            )


async def _health(request: Request) -> Response:
    """Whether the server is alive."""
    is_dead = any(model.is_dead for model in _admission(request).models if model.is_required)
    return Response(status_code=503 if is_dead else 200, headers=_retry(is_dead))


async def _ready(request: Request) -> Response:
    """Whether the server is ready for requests."""
    is_ready = _admission(request).is_ready
    return Response(status_code=200 if is_ready else 503, headers=_retry(not is_ready))


def pictures(admission: ServerState) -> Iterator[Picture]:
    """Every model as it stands, for gauges."""
    for model in admission.models:
        states = [record.state for record, _ in admission.open_requests.values() if record.model == model.name]
        num_running, stats = states.count("running"), model.stats()
        yield Picture(
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
    """For routes with a body: the admission, and the caller that the guard has admitted."""
    return _admission(request), request.scope["quire.caller"]


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _retry(is_needed: bool) -> dict[str, str] | None:
    return {"retry-after": str(LOADING_RETRY_S)} if is_needed else None


async def _no_such_route(request: Request, error: Exception) -> Response:
    """The framework's own refusals, in our shape."""
    status = error.status_code if isinstance(error, HTTPException) else 400
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
    allowed = allowed_methods(request)
    message = f"no such route: {request.method} {request.scope['path'][:200]}"
    if status == 405:
        message = f"{message}; expected {allowed}"
    headers = (("allow", allowed),) if status == 405 else ()
    return await error_response(request, ApiError(status, code, message, headers=headers))
