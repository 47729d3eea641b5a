"""A fleet on Ray as data: arguments, the config file, other numbers of members. Nothing here needs ray."""

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
    check_config,
    read_args,
    rule_of,
    scaled,
    serve_config,
    settings_of_args,
    with_applications,
    without_application,
)

ROOT = Path(__file__).parents[4]
ARGS = RayFleetArgs("org/model", settings={"memory": "2GiB", "max_running": 8, "no_page": True})


@pytest.fixture(autouse=True)
def _nobody_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def test_arguments_say_what_members_load_and_by_what_they_are_scaled() -> None:
    args = read_args({"model": "org/model", "settings": {"memory": "2GiB", "max_running": 8, "no_page": True}})
    assert args == ARGS
    settings = settings_of_args(args)
    assert (settings.model.memory_bytes, settings.server.no_page) == (2 << 30, True)
    assert args.served_name == "model"
    rule = rule_of(args, settings)
    assert (rule.num_tokens, rule.num_running) == (4096, 8)


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
    with pytest.raises(ConfigError, match="memry"):
        settings_of_args(RayFleetArgs("m", settings={"memry": "2GiB"}))


@pytest.mark.parametrize(("text", "count"), [("3", (3, 3)), ("1-8", (1, 8)), ("2-2", (2, 2))])
def test_members_are_a_number_or_a_range(text: str, count: tuple[int, int]) -> None:
    assert MemberCount.parse(text) == MemberCount(*count)


@pytest.mark.parametrize("text", ["", "0", "0-3", "3-1", "-3", "1-", "two", "1-2-3", "10001"])
def test_other_numbers_of_members_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"got '{text}'"):
        MemberCount.parse(text)


def test_a_config_has_both_deployments_and_listens_where_its_gateways_believe() -> None:
    config = serve_config(ARGS, MemberCount(2, 2), 3)
    assert check_config(config) is config
    (application,) = config["applications"]
    assert application["import_path"] == IMPORT_PATH
    assert application["deployments"] == [
        MemberCount(2, 2).deployment,
        {"name": GATEWAY, "num_replicas": 3},
    ]
    assert read_args(application["args"]) == ARGS
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8000}
    with pytest.raises(ConfigError, match="at least 1 gateway"):
        serve_config(ARGS, MemberCount(2, 2), 0)


def test_a_range_of_members_follows_our_policy() -> None:
    (member, _) = serve_config(ARGS, MemberCount(1, 3))["applications"][0]["deployments"]
    scaling = member["autoscaling_config"]
    assert member["name"] == MEMBER
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (1, 3)
    assert scaling["policy"] == {"policy_function": POLICY}


@pytest.mark.parametrize("config", [None, [], {}, {"applications": 1}])
def test_what_is_no_config_is_refused(config: object) -> None:
    with pytest.raises(ConfigError, match="list of applications"):
        check_config(config)


def test_proxies_that_listen_elsewhere_than_gateways_believe_are_refused() -> None:
    config = serve_config(ARGS, MemberCount(1, 1))
    config["http_options"]["host"] = "10.0.0.1"
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1 in http_options"):
        check_config(config)


def test_another_number_of_members_leaves_the_rest_of_an_application_as_it_was() -> None:
    (before,) = serve_config(ARGS, MemberCount(1, 3))["applications"]
    before["deployments"][0]["ray_actor_options"] = {"num_cpus": 2}
    after = scaled(before, MemberCount(4, 4))
    assert after["deployments"][0] == {**MemberCount(4, 4).deployment, "ray_actor_options": {"num_cpus": 2}}
    assert after["deployments"][1] == before["deployments"][1]
    assert after["args"] == before["args"]
    assert before["deployments"][0]["autoscaling_config"]["min_replicas"] == 1
    assert scaled({"name": "a"}, MemberCount(2, 2))["deployments"] == [MemberCount(2, 2).deployment]


def test_who_deploys_a_fleet_ends_no_other_application() -> None:
    details = {
        "applications": {
            "theirs": {"deployed_app_config": {"name": "theirs", "import_path": "a:b"}},
            "quire": {"deployed_app_config": {"name": "quire", "import_path": "old:one"}},
            "by hand": {"deployed_app_config": None},
        }
    }
    config = with_applications(details, serve_config(ARGS, MemberCount(1, 1)))
    assert [one["name"] for one in config["applications"]] == ["quire", "theirs"]
    assert without_application(details, "quire") == {"applications": [{"name": "theirs", "import_path": "a:b"}]}
    assert config["applications"][0]["import_path"] == IMPORT_PATH


def test_the_file_that_is_shipped_is_such_a_config() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "ray" / "fleet.yaml").read_text())
    (application,) = check_config(config)["applications"]
    made = serve_config(read_args(application["args"]), MemberCount(1, 3))["applications"][0]
    assert made["deployments"] == application["deployments"]
