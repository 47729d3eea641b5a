"""A gateway as an ASGI application without a listener, for control planes with their own HTTP proxies.

    clients ──HTTP──► the control plane's proxy ──ASGI──► GatewayApp ── encrypted ──► members

The proxy must provide the other functions of `quire fleet gateway`: sockets, signals, connection limits.
"""

import asyncio

from quire.api.app import make_asgi
from quire.api.asgi import RequestMiddleware
from quire.api.serving import Plan, prepare
from quire.config import OnDemandModel, Settings
from quire.errors import EngineDeadError
from quire.fleet.gateway.client import FleetModel
from quire.fleet.gateway.discovery import MemberSource
from quire.fleet.protocol.keys import GatewayKeys
from quire.lasting_objects import freeze_startup_objects


class GatewayApp:
    """The API of one model. The fleet members that `source` lists compute the responses."""

    def __init__(
        self,
        name: str,
        source: MemberSource,
        keys: GatewayKeys | None,
        settings: Settings,
        *,
        allow_no_keys: bool = False,
    ) -> None:
        """`settings.server.host` must be the address on which the proxy listens. Raises ConfigError."""
        settings.server.check_keys_file()
        plan = Plan([OnDemandModel(name, name, is_kept=True)], settings, allow_no_keys)
        self._parts = prepare(plan, lambda _model, _report: FleetModel(name, source, keys, settings.serving.queue))
        self._drain_s = settings.server.drain_s
        self._is_closed = False
        self.asgi: RequestMiddleware = make_asgi(self._parts.admission, self._parts.gate)

    async def start(self) -> None:
        """Wait until the first member is connected and its tokenizer is loaded."""
        await self._parts.models.start()
        self._parts.admission.activity.start()
        freeze_startup_objects()

    def check(self) -> None:
        """Raise EngineDeadError if a model's engine has stopped permanently."""
        for model in self._parts.models:
            if model.is_dead:
                raise EngineDeadError(f"the engine of {model.name} has stopped")

    async def close(self) -> int:
        """Wait at most `drain_s` for open requests; return how many had to be ended. A second call does nothing."""
        if self._is_closed:
            return 0
        self._is_closed = True
        admission, store = self._parts.admission, self._parts.admission.settings.store
        num_ended = await admission.drain(self._drain_s, asyncio.Event())
        await self._parts.models.close()
        if store is not None:
            store.close()
        return num_ended
