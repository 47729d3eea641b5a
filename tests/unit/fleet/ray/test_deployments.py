"""What of a fleet on Ray can be tested without a cluster: the policy, and how gateways learn who is there."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from quire.errors import ConfigError
from quire.fleet.ray.deployments import LOAD, RayMembers, scale_members
from tests.support.errors import raises_code


def context(loads: dict[str, float] | None) -> Any:
    return SimpleNamespace(aggregated_metrics=None if loads is None else {LOAD: loads, "other": {"a": 9.0}})


@pytest.mark.parametrize(
    ("loads", "wanted"), [(None, 1), ({}, 1), ({"a": 0.0}, 1), ({"a": 2.2}, 3), ({"a": 1.0, "b": 1.5}, 3)]
)
def test_members_are_wanted_by_what_they_have_to_do(loads: dict[str, float] | None, wanted: int) -> None:
    assert scale_members(context(loads)) == (wanted, {})


def registry(answer: list[str] | Exception) -> Any:
    async def told() -> list[str]:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SimpleNamespace(addresses=SimpleNamespace(remote=told))


def test_gateways_ask_the_registry_who_is_there() -> None:
    assert asyncio.run(RayMembers(registry(["tcp://a:1"])).addresses()) == ["tcp://a:1"]


@pytest.mark.parametrize("answer", [[], RayError("the head is gone"), TimeoutError()])
def test_a_registry_that_does_not_know_leaves_members_as_they_are(answer: list[str] | Exception) -> None:
    with raises_code(ConfigError, "invalid_config"):
        asyncio.run(RayMembers(registry(answer)).addresses())
