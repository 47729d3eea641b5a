"""Handlers for the stream of watch events and for one block's details. They are served to keys made with `--admin`, and
on the operator's socket.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.http.body import ClientGoneError, while_client_stays
from quire.api.http.errors import ApiError, invalid
from quire.api.http.request_record import RequestRecord
from quire.api.http.sse import HEADERS, Send, json_response, named_event
from quire.api.models.registry import ModelEntry
from quire.api.watch.timeline import shown_id
from quire.api.watch.watchers import ModelWatch, Watchers
from quire.core.inspect.snapshots import BlockFacts


class WatchResponse(Response):
    """A stream of events, until the subscriber disconnects or the server ends."""

    background = None

    def __init__(
        self, watchers: Watchers, model: ModelEntry, is_over: Callable[[], bool], *, includes_lines: bool
    ) -> None:
        """`is_over` returns whether the subscriber's access has ended; `includes_lines`: warnings have prompt lines."""
        self._watchers = watchers
        self._model = model
        self._is_over = is_over
        self._includes_lines = includes_lines

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the newest event each time; a slow subscriber misses events."""
        record: RequestRecord = scope["quire.record"]
        record.is_streamed = True
        with self._watchers.subscription(self._model) as watch:
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            try:
                await while_client_stays(receive, self._send_all(watch, send))
            except ClientGoneError:
                record.is_cut = True

    async def _send_all(self, watch: ModelWatch, send: Send) -> None:
        number = num_rows = 0
        while True:
            await watch.wait_for_newer(number)
            if watch.number <= number or self._is_over():
                break
            number = watch.number
            data, num_rows = watch.newest_event(num_rows, includes_lines=self._includes_lines)
            await send({"type": "http.response.body", "body": named_event(b"snapshot", data), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def watch_response(
    watchers: Watchers, request: Request, *, includes_lines: bool, is_over: Callable[[], bool] = lambda: False
) -> WatchResponse:
    """Return the event stream of the model that the request names."""
    return WatchResponse(watchers, _model(watchers, request), is_over, includes_lines=includes_lines)


async def block_response(watchers: Watchers, request: Request) -> Response:
    """Return one block's details as JSON."""
    model, number = _model(watchers, request), request.path_params["block"]
    if not re.fullmatch("[0-9]{1,10}", number):
        raise invalid(f"expected a block number, got {number[:40]!r}", "block")
    facts = await model.open().block(int(number))
    if facts is None:
        raise ApiError(404, "not_found", f"the pool of {model.name} has no block {number}")
    return json_response(_with_client_ids(watchers, model, facts))


def _model(watchers: Watchers, request: Request) -> ModelEntry:
    """Return the model that the request names, by default the first."""
    name = request.query_params.get("model")
    models = watchers.admission.models
    return next(iter(models)) if name is None else models.named(name)


def _with_client_ids(watchers: Watchers, model: ModelEntry, facts: BlockFacts) -> BlockFacts:
    """Replace the engine's request ids by the clients' ids. Requests that ended in the meantime are omitted."""
    records = watchers.activity.open_of(model.name)
    client_ids = {handle.request_id: shown_id(record) for record in records for handle in record.handles}
    requests = tuple(dict.fromkeys(client_ids[name] for name in facts.requests if name in client_ids))
    return msgspec.structs.replace(facts, requests=requests, tenant=facts.tenant or _tenant_of(facts.cache_group))


def _tenant_of(cache_group: str | None) -> str | None:
    """Return the tenant from the name of its cache group (see `dialects.resolved_request`)."""
    if cache_group is None or not cache_group.startswith("tenant:"):
        return None
    return cache_group.removeprefix("tenant:").partition("/salt:")[0]
