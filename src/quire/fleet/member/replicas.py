"""Members on this machine, for `quire serve MODEL --replicas N`: child processes behind a gateway in this one.

    this process: API, gateway ──ipc──► member 1 ─► worker
                                ──ipc──► member 2 ─► worker

Each member reads its `ReplicaSpec` (model and settings) from standard input, which stays open while the parent runs:
when it closes, the member drains and exits. A member that exits unexpectedly is restarted, with growing delays.
"""

import asyncio
import contextlib
import logging
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import msgspec

from quire.backends.kernels.threads import default_threads
from quire.checkpoints import resolve
from quire.client.engines.served import plan_worker
from quire.config import ModelSettings, ServingSettings
from quire.config.machine import memory_budget_bytes
from quire.config.model_settings import MEMORY_SHARE
from quire.errors import ConfigError, EngineDeadError
from quire.fleet.gateway.client import FleetModel
from quire.fleet.gateway.discovery import FixedMembers
from quire.fleet.protocol.keys import MemberKeys
from quire.fleet.protocol.messages import TextAssets
from quire.fleet.protocol.text_assets import text_assets_of
from quire.worker.messages import Open

log = logging.getLogger("quire.fleet")

COMMAND = (sys.executable, "-m", "quire.fleet.member.replica_process")
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 30.0
POLL_S = 0.02
END_S = 10.0
"""Time after a member's drain limit until it is killed."""


class ReplicaSpec(msgspec.Struct, frozen=True):
    """The model and settings of a member, which its parent sends as length-prefixed msgpack."""

    name: str
    address: str
    open_message: Open = msgspec.field(name="open")
    text_assets: TextAssets
    stuck_s: float
    drain_s: float
    keys: MemberKeys | None = None
    """None: the member is reachable from this machine only."""
    reports_status: bool = False
    """Whether the member writes a status line to its standard output each second."""


def settings_of_replica(settings: ModelSettings, num_replicas: int) -> ModelSettings:
    """Divide the memory and threads of `settings` by the number of replicas. Raises ConfigError below 1 replica."""
    if num_replicas < 1:
        raise ConfigError(f"expected at least 1 replica, got {num_replicas}", ("replicas",))
    memory_bytes = settings.memory_bytes or memory_budget_bytes(MEMORY_SHARE)
    num_threads = settings.num_threads or default_threads()
    return replace(settings, memory_bytes=memory_bytes // num_replicas, num_threads=max(1, num_threads // num_replicas))


def encode_spec(spec: ReplicaSpec) -> bytes:
    """Encode a spec as a member reads it from standard input."""
    data = msgspec.msgpack.encode(spec)
    return len(data).to_bytes(8, "big") + data


def replica_spec(
    model: str, num_replicas: int, settings: ModelSettings, serving: ServingSettings, drain_s: float
) -> ReplicaSpec:
    """Return the spec of every replica; the address is set later. Blocks on disk and network I/O. Raises ConfigError
    if `serving` has `kv_events`, because replicas publish at their own addresses."""
    if serving.kv_events is not None:
        message = f"expected no kv_events with replicas, which publish at their own addresses, got {serving.kv_events}"
        raise ConfigError(f"{message}; omit it", ("kv_events",))
    replica_settings = settings_of_replica(settings, num_replicas)
    plan = plan_worker(model, replica_settings, serving)().plan
    return ReplicaSpec(
        Path(model).name, "", plan.open_message, text_assets_of(resolve(model), settings), plan.limits.stuck_s, drain_s
    )


@asynccontextmanager
async def replicated_model(
    name: str, spec: ReplicaSpec, num_replicas: int, max_held: int, command: Sequence[str] = COMMAND
) -> AsyncIterator[FleetModel]:
    """Run a model in `num_replicas` members on this machine; yield it when all of them are ready. Raises
    EngineDeadError if one exits before."""
    async with Replicas(spec, num_replicas, command) as replicas, AsyncExitStack() as stack:
        model = FleetModel(name, FixedMembers(replicas.addresses), None, max_held)
        opening = asyncio.create_task(_wait_until_ready(stack, model, num_replicas))
        try:
            await asyncio.wait({opening, replicas.failed}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                replicas.failed.result()
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        opening.result()
        replicas.is_ready = True
        yield model


async def _wait_until_ready(stack: AsyncExitStack, model: FleetModel, num_replicas: int) -> None:
    await stack.enter_async_context(model)
    while model.fleet.num_ready < num_replicas:
        await asyncio.sleep(POLL_S)


class Replicas:
    """Member processes that listen on IPC sockets in a folder that only this user can access."""

    def __init__(self, spec: ReplicaSpec, num_replicas: int, command: Sequence[str] = COMMAND) -> None:
        """`spec` is for every member; each gets its own address."""
        self._spec = spec
        self._command = command
        self._folder = tempfile.TemporaryDirectory(prefix="quire-fleet-")
        self.addresses = [f"ipc://{Path(self._folder.name) / f'member-{index}'}" for index in range(num_replicas)]
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = asyncio.Event()
        self.pids: dict[str, int] = {}
        """Process ids of live members, by address."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with EngineDeadError if a member exits before `is_ready` is set."""
        self.failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())  # may never be awaited
        self.is_ready = False

    async def __aenter__(self) -> "Replicas":
        self._tasks = [asyncio.create_task(self._keep(path), name=f"quire-replica {path}") for path in self.addresses]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._folder.cleanup()

    async def _keep(self, address: str) -> None:
        """Run a member at this address and restart it whenever it exits, until closed."""
        delay_s = FIRST_DELAY_S
        while not self._closing.is_set():
            start_s = asyncio.get_running_loop().time()
            code = await self._run_once(address)
            if self._closing.is_set():
                return
            log.warning("member %s exited with code %s; starting a new one", address, code)
            if not self.is_ready and not self.failed.done():
                self.failed.set_exception(
                    EngineDeadError(f"a member exited with code {code} before it was ready; see its output above")
                )
            run_s = asyncio.get_running_loop().time() - start_s
            delay_s = FIRST_DELAY_S if run_s > MAX_DELAY_S else min(MAX_DELAY_S, delay_s * 2)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), delay_s)

    async def _run_once(self, address: str) -> int:
        encoded_spec = encode_spec(msgspec.structs.replace(self._spec, address=address))
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must reach only the gateway, which drains
        )
        self.pids[address] = process.pid
        try:
            if process.stdin is not None:
                process.stdin.write(encoded_spec)
                with contextlib.suppress(ConnectionError):
                    await process.stdin.drain()
            exit_task, close_task = asyncio.ensure_future(process.wait()), asyncio.ensure_future(self._closing.wait())
            await asyncio.wait({exit_task, close_task}, return_when=asyncio.FIRST_COMPLETED)
            close_task.cancel()
            if not exit_task.done():
                process.send_signal(signal.SIGTERM)
                await asyncio.wait({exit_task}, timeout=self._spec.drain_s + END_S)
            return process.returncode if process.returncode is not None else -signal.SIGKILL
        finally:
            del self.pids[address]
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
