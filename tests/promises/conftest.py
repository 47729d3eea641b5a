"""Servers that many promises share: they take seconds to start, and none of the tests changes them for the next."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.api.access.keys import add_key
from tests.support.models.tiny_models import make_directory
from tests.support.servers.live_server import SIZES, TINY, Server, oracle, running

SLOW = ("--running", "4", "--step-s", "0.01", "--sequence-tokens", "4096", "--blocks", "2048")
"""A server with four places, in which a longest answer takes more than forty seconds."""


@dataclass(frozen=True)
class Served:
    """`quire serve` of two tiny models, with the keys of four tenants."""

    server: Server
    alice: str
    bob: str
    team: tuple[str, str]
    """Two keys of one cache group."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, real but for its weights."""
    return make_directory(tmp_path_factory.mktemp("promises") / "one", tiny=TINY)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    other = make_directory(folder / "two", tiny=TINY)
    keys = folder / "keys.json"
    alice, bob = add_key(keys, "alice", max_class="high"), add_key(keys, "bob")
    team = (add_key(keys, "team-dev", cache_group="team"), add_key(keys, "team-ci", cache_group="team"))
    with running(folder, "quire", "serve", str(tiny_model), str(other), *SIZES, keys=keys) as server:
        yield Served(server, alice, bob, team)


@dataclass(frozen=True)
class Busy:
    """A server with four places, a queue of twelve, and steps that take their time."""

    server: Server
    urgent: str
    usual: str


@pytest.fixture(scope="session")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    folder = tmp_path_factory.mktemp("busy")
    keys = folder / "keys.json"
    urgent, usual = add_key(keys, "urgent", max_class="high"), add_key(keys, "usual")
    with oracle(folder, *SLOW, "--queue", "12", keys=keys) as server:
        yield Busy(server, urgent, usual)
