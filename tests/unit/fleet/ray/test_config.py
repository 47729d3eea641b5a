"""A fleet on Ray as data: arguments and the config file. Nothing here needs ray."""

from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from quire.errors import ConfigError
from quire.fleet.ray.config import (
    GATEWAY,
    IMPORT_PATH,
    MEMBER,
    POLICY,
    MemberCount,
    RayFleetArgs,
    read_args,
    serve_config,
    settings_from,
)
from tests.support.errors import raises_code

ROOT = Path(__file__).parents[4]
ARGS = RayFleetArgs("org/model", settings={"memory": "2GiB", "max_running": 8, "no_page": True})


@pytest.fixture(autouse=True)
def _nobody_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def test_arguments_say_what_members_load_and_by_what_they_are_scaled() -> None:
    args = read_args({"model": "org/model", "settings": {"memory": "2GiB", "max_running": 8, "no_page": True}})
    assert args == ARGS
    settings = settings_from(args)
    assert (settings.model.memory_bytes, settings.server.no_page) == (2 << 30, True)
    assert args.served_name == "model"
    assert (args.tokens_per_member, settings.model.max_running) == (4096, 8)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "missing required field `model`"),
        ({"model": ""}, "length >= 1"),
        ({"model": "m", "members": 3}, "unknown field `members`"),
        ({"model": "m", "tokens_per_member": 0}, ">= 1"),
        ({"model": "m", "member_keys": "/one"}, "name both files"),
    ],
)
def test_arguments_that_cannot_be_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_args(given)


def test_a_setting_that_is_none_is_refused() -> None:
    with raises_code(ConfigError, "unknown_setting"):
        settings_from(RayFleetArgs("m", settings={"memry": "2GiB"}))


@pytest.mark.parametrize(("text", "count"), [("3", (3, 3)), ("1-8", (1, 8)), ("2-2", (2, 2))])
def test_members_are_a_number_or_a_range(text: str, count: tuple[int, int]) -> None:
    assert MemberCount.parse(text) == MemberCount(*count)


@pytest.mark.parametrize("text", ["", "0", "0-3", "3-1", "-3", "1-", "two", "1-2-3", "10001"])
def test_other_numbers_of_members_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        MemberCount.parse(text)
    assert refused.value.settings == ("members",)


def test_a_config_has_both_deployments_and_listens_at_the_host_of_its_settings() -> None:
    config = serve_config(ARGS, MemberCount(2, 2), 3)
    (application,) = config["applications"]
    assert application["import_path"] == IMPORT_PATH
    assert application["deployments"] == [
        MemberCount(2, 2).deployment,
        {"name": GATEWAY, "num_replicas": 3},
    ]
    assert read_args(application["args"]) == ARGS
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8000}
    with pytest.raises(ConfigError) as refused:
        serve_config(ARGS, MemberCount(2, 2), 0)
    assert refused.value.settings == ("gateways",)


def test_a_range_of_members_follows_our_policy() -> None:
    (member, _) = serve_config(ARGS, MemberCount(1, 3))["applications"][0]["deployments"]
    scaling = member["autoscaling_config"]
    assert member["name"] == MEMBER
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (1, 3)
    assert scaling["policy"] == {"policy_function": POLICY}


def test_the_file_that_is_shipped_is_such_a_config() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "ray" / "fleet.yaml").read_text())
    (application,) = config["applications"]
    assert config == serve_config(read_args(application["args"]), MemberCount(1, 3))
