"""One house for all tests that only ask: it must be as empty after each of them as before."""

from collections.abc import Iterator

import pytest

from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import talker


@pytest.fixture(autouse=True)
def _last_words_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ends gives its last answers two seconds; a busy machine may need more to write them."""
    monkeypatch.setattr("quire.api.access.admission.CLOSE_GRACE_S", PATIENCE_S)


@pytest.fixture(scope="package")
def _shared_house() -> Iterator[LiveServer]:
    with house(models={"oracle": talker(num_blocks=512), "other": talker()}) as here:
        yield here


@pytest.fixture
def here(_shared_house: LiveServer) -> Iterator[LiveServer]:
    """A server with two models and no keys."""
    yield _shared_house
    _shared_house.wait_until_free()
