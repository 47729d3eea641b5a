"""A gateway without a listener of its own: for a control plane that has proxies, and hands requests to an application.

    clients ──HTTP──► the control plane's proxy ──ASGI──► this ── encrypted ──► members

The proxy does what `quire fleet gateway` does besides: sockets, signals, limits of connections.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quire.api.app import make_asgi
from quire.api.asgi import RequestMiddleware
from quire.api.server import CLOSE_GRACE_S
from quire.api.serving import Plan, prepare
from quire.config import OnDemandModel, Settings
from quire.errors import EngineDeadError
from quire.fleet.gateway.client import FleetModel
from quire.fleet.gateway.discovery import MemberSource
from quire.fleet.protocol.keys import GatewayKeys
from quire.lasting_objects import freeze_startup_objects


class GatewayApp:
    """The API over the members that a source names."""

    def __init__(
        self,
        name: str,
        source: MemberSource,
        keys: GatewayKeys | None,
        settings: Settings,
        *,
        allow_no_keys: bool = False,
    ) -> None:
        """`host` of the settings is where the proxy listens. Raises ConfigError."""

        @asynccontextmanager
        async def opened(_model: OnDemandModel, _report_progress: object) -> AsyncIterator[FleetModel]:
            async with FleetModel(name, source, keys, settings.serving.queue) as client:
                yield client

        settings.server.check_keys_file()
        plan = Plan([OnDemandModel(name, name, is_kept=True)], settings, allow_no_keys)
        self._prepared = prepare(plan, opened)
        self._drain_s = settings.server.drain_s
        self._is_closed = False
        self.asgi: RequestMiddleware = make_asgi(self._prepared.admission, self._prepared.gate)

    async def start(self) -> None:
        """Wait for the first member, and its tokenizer."""
        await self._prepared.park.start()
        freeze_startup_objects()

    def check(self) -> None:
        """Raises EngineDeadError if a model's engine has stopped for good."""
        for model in self._prepared.models:
            if model.is_dead:
                raise EngineDeadError(f"the engine of {model.name} has stopped")

    async def close(self) -> int:
        """Let open requests finish, within bounds; how many had to be ended. A second call does nothing."""
        if self._is_closed:
            return 0
        self._is_closed = True
        admission, store = self._prepared.admission, self._prepared.limits.store
        num_ended = await admission.drain(self._drain_s, asyncio.Event())
        await admission.emptied(CLOSE_GRACE_S)
        await self._prepared.park.close()
        if store is not None:
            store.close()
        return num_ended
