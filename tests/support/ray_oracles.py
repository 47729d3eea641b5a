"""A fleet on Ray whose members have an oracle instead of a model. Its Serve config says

import_path: tests.support.ray_oracles:app
"""

from dataclasses import replace
from typing import Any

from quire.config import Settings
from quire.core.waiting_queue import QueueConfig
from quire.fleet.ray_config import RayFleetArgs
from quire.fleet.ray_control import application
from quire.fleet.replicas import ReplicaOrder
from quire.worker.messages import Open
from tests.support.oracle_replica import COMMAND
from tests.support.oracle_worker import SETTINGS
from tests.support.small_fleets import oracle_words
from tests.support.talkers import TEMPLATE, talker


def oracle_order(_args: RayFleetArgs, settings: Settings) -> ReplicaOrder:
    size = talker(template=TEMPLATE).text.vocabulary_size
    own = replace(SETTINGS, max_running=settings.model.max_running)
    opened = Open(str(size), own, QueueConfig(), bytes(32))
    return ReplicaOrder("oracle", "", opened, oracle_words(), 30.0, settings.server.drain_s)


def app(args: dict[str, Any]) -> Any:
    return application(args, oracle_order, COMMAND)
