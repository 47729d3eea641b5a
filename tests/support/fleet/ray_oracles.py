"""A fleet on Ray whose members have an oracle instead of a model. Its Serve config says

import_path: tests.support.fleet.ray_oracles:app
"""

from dataclasses import replace
from typing import Any

from quire.config import Settings
from quire.core.scheduling.waiting_queue import QueueConfig
from quire.fleet.member.replicas import ReplicaSpec
from quire.fleet.ray.config import RayFleetArgs
from quire.fleet.ray.deployments import build_app
from quire.worker.messages import Open
from tests.support.fleet.oracle_replica import COMMAND
from tests.support.fleet.small_fleets import oracle_words
from tests.support.servers.talkers import TEMPLATE, talker
from tests.support.workers.oracle_worker import SETTINGS


def oracle_order(_args: RayFleetArgs, settings: Settings) -> ReplicaSpec:
    size = talker(template=TEMPLATE).text.vocabulary_size
    own = replace(SETTINGS, max_running=settings.model.max_running)
    opened = Open(str(size), own, QueueConfig(), bytes(32))
    return ReplicaSpec("oracle", "", opened, oracle_words(), 30.0, settings.server.drain_s)


def app(args: dict[str, Any]) -> Any:
    return build_app(args, oracle_order, COMMAND)
