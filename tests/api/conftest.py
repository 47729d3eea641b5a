"""One house for all tests that only ask: it must be as empty after each of them as before."""

from collections.abc import Iterator

import pytest

from tests.support.doors import House, house
from tests.support.talkers import talker


@pytest.fixture(scope="package")
def _shared_house() -> Iterator[House]:
    with house(models={"oracle": talker(num_blocks=512), "other": talker()}) as here:
        yield here


@pytest.fixture
def here(_shared_house: House) -> Iterator[House]:
    """A server with two models and no keys."""
    yield _shared_house
    _shared_house.wait_until_free()
