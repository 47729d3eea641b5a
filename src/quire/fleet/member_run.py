"""A member from its start to its end: a worker that loads, an address that gateways find, and a way to leave."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.checkpoints import Checkpoint, resolve
from quire.client.served import plan_worker
from quire.config import ModelSettings, ServingSettings
from quire.errors import CheckpointError
from quire.fleet.fleet_keys import MemberKeys
from quire.fleet.fleet_messages import MemberCard, ModelWords
from quire.fleet.member_server import MemberServer
from quire.worker.messages import Ready
from quire.worker.supervisor import Supervisor
from quire.worker.worker_plan import WorkerPlan

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """What a member needs to begin."""

    name: str
    address: str
    keys: MemberKeys | None
    worker: WorkerPlan
    words: ModelWords


def plan_member(
    model: str, address: str, keys: MemberKeys | None, settings: ModelSettings, serving: ServingSettings
) -> MemberPlan:
    """Resolve a model. Reads disks and perhaps a network: not for an event loop."""
    return MemberPlan(
        Path(model).name,
        address,
        keys,
        plan_worker(model, settings, serving)().plan,
        words_of(resolve(model), settings),
    )


def words_of(checkpoint: Checkpoint, settings: ModelSettings) -> ModelWords:
    """What gateways need to read and write the model's text."""
    if checkpoint.tokenizer_file is None:
        raise CheckpointError(f"{checkpoint.name} has no tokenizer.json; quire needs one to read and write text")
    return ModelWords(
        checkpoint.tokenizer_file.read_bytes(),
        checkpoint.chat_template,
        tuple(sorted(checkpoint.eos_token_ids)),
        tuple(sorted(checkpoint.eos_texts)),
        checkpoint.special_tokens,
        checkpoint.generation_defaults,
        settings.tool_format == "hermes",
    )


async def run_member(plan: MemberPlan, ending: asyncio.Event, drain_s: float, say: Say) -> bool:
    """Until it is told to end; false if what ran had to be broken off."""
    server = MemberServer(plan.address, plan.keys, plan.words)
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        ending.set()

    supervisor = Supervisor(plan.worker, server.listener, fail)
    try:
        ready = await _ready_unless_ended(supervisor, ending)
        if failures:
            raise failures[0]
        if ready is None:
            return True
        server.start(supervisor, lambda life: MemberCard(plan.name, ready.info, life))
        say(f"{plan.name}: {ready.info.line}")
        say(f"member at {server.address}, {'with keys' if plan.keys else 'in clear: this machine alone'}")
        await ending.wait()
        if failures:
            raise failures[0]
        server.drain()
        return await supervisor.drain(drain_s)
    finally:
        await server.close()
        await supervisor.close()


async def _ready_unless_ended(supervisor: Supervisor, ending: asyncio.Event) -> Ready | None:
    """None: it was told to end while it loaded."""
    starting = asyncio.ensure_future(supervisor.start())
    told = asyncio.ensure_future(ending.wait())
    await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    return None
