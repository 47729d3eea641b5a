"""Routes for watchers: the stream of events, and one block. On the public server for a key made with `--admin`, and on
the operator's socket.
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
from quire.api.http.sse import HEADERS, Send, named_event
from quire.api.models.registry import ModelEntry
from quire.api.watch.timeline import shown_id
from quire.api.watch.watchers import ModelWatch, ServerWithWatchers
from quire.core.inspect.snapshots import BlockFacts


class Watching(Response):
    """A stream of events, until the reader disconnects or the server ends."""

    background = None

    def __init__(
        self,
        server: ServerWithWatchers,
        model: ModelEntry,
        is_over: Callable[[], bool] = lambda: False,
        *,
        reads_lines: bool = False,
    ) -> None:
        """`is_over`: the reader may not go on reading; `reads_lines`: it may see lines of clients in warnings."""
        self._server = server
        self._model = model
        self._is_over = is_over
        self._reads_lines = reads_lines

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send each newest event; a slow reader misses those between."""
        record: RequestRecord = scope["quire.record"]
        record.is_streamed = True
        with self._server.watchers.reading(self._model) as watch:
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            try:
                await while_client_stays(receive, self._send_all(watch, send))
            except ClientGoneError:
                record.is_cut = True

    async def _send_all(self, watch: ModelWatch, send: Send) -> None:
        number = num_rows = 0
        while True:
            await watch.newer_than(number)
            if watch.number <= number or self._is_over():
                break
            number = watch.number
            data, num_rows = watch.event_after(num_rows, reads_lines=self._reads_lines)
            await send({"type": "http.response.body", "body": named_event(b"snapshot", data), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def watching(
    server: ServerWithWatchers, request: Request, *, reads_lines: bool, is_over: Callable[[], bool] = lambda: False
) -> Watching:
    """The stream that this request selects."""
    return Watching(server, _model(server, request), is_over, reads_lines=reads_lines)


async def block_answer(server: ServerWithWatchers, request: Request) -> Response:
    """One block, as JSON."""
    model, number = _model(server, request), request.path_params["block"]
    if not re.fullmatch("[0-9]{1,10}", number):
        raise invalid(f"expected a block number, got {number[:40]!r}", "block")
    facts = await model.open().block(int(number))
    if facts is None:
        raise ApiError(404, "not_found", f"the pool of {model.name} has no block {number}")
    return Response(msgspec.json.encode(_with_client_ids(server, model, facts)), media_type="application/json")


def _model(server: ServerWithWatchers, request: Request) -> ModelEntry:
    """The one that is named; the first, if none is."""
    name = request.query_params.get("model")
    return next(iter(server.models)) if name is None else server.models.named(name)


def _with_client_ids(server: ServerWithWatchers, model: ModelEntry, facts: BlockFacts) -> BlockFacts:
    """Its requests under the clients' ids. One that ended since the worker responded has none, and is left out."""
    records = server.activity.open_of(model.name)
    names = {handle.request_id: shown_id(record) for record in records for handle in record.handles}
    requests = tuple(dict.fromkeys(names[one] for one in facts.requests if one in names))
    return msgspec.structs.replace(facts, requests=requests, tenant=facts.tenant or _tenant_of(facts.cache_group))


def _tenant_of(cache_group: str | None) -> str | None:
    """A cache group is called after its tenant (`dialects.request_options`)."""
    if cache_group is None or not cache_group.startswith("tenant:"):
        return None
    return cache_group.removeprefix("tenant:").partition("/salt:")[0]
