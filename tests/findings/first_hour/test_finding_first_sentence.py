"""The first sentence of README: a prefix that "anyone" has paid for was computed once for one key alone, and no setting
let several keys share it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.errors import ConfigError
from tests.support.errors import raises_code
from tests.support.servers.local_api import LiveServer, Reply, house

COMPLETE, EXPLAIN = "/v1/completions", "/v1/cache/explain"
TEXT = "What is said at length before the question, and is the same for all of a team. "
NAMES = {"alice": "team-a", "bob": "team-a", "carol": "team-b", "team-a": None, "dave": None}
"""Keys, and the cache group of each. One is called as a group is."""


def add(path: Path, name: str, group: str | None) -> str:
    """The secret of a new key."""
    words = ["keys", "add", name, "--keys-file", str(path), *(("--cache-group", group) if group else ())]
    made = CliRunner().invoke(app, words)
    assert made.exit_code == 0, made.output
    return made.stdout.strip()


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, dict[str, str]]]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    secrets = {name: add(path, name, group) for name, group in NAMES.items()}
    with house(keys_file=path) as here:
        yield here, secrets


def send(here: LiveServer, key: str, text: str, path: str = COMPLETE, **more: Any) -> Reply:
    return here.post(path, {"model": "oracle", "prompt": text, "max_tokens": 1, **more}, x_api_key=key)


def cached_tokens(answer: Reply) -> int:
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_second_key_of_a_group_finds_what_the_first_has_paid_for(locked: tuple[LiveServer, dict[str, str]]) -> None:
    here, keys = locked
    text = "Found by the second. " + TEXT
    assert cached_tokens(send(here, keys["alice"], text)) == 0
    own = cached_tokens(send(here, keys["alice"], text))
    assert own > 0
    assert cached_tokens(send(here, keys["bob"], text)) == own


@pytest.mark.parametrize("other", ["carol", "team-a", "dave"])
@pytest.mark.parametrize("salt", [None, "group:team-a", "/salt:", "team-a"])
def test_no_key_of_another_group_or_of_none_does_and_nothing_tells_it(
    locked: tuple[LiveServer, dict[str, str]], other: str, salt: str | None
) -> None:
    here, keys = locked
    text, never = f"Not found by {other}, {salt}. " + TEXT, f"Never sent, not {other}, {salt}. " + TEXT
    more = {} if salt is None else {"cache_salt": salt}
    send(here, keys["alice"], text)
    seen, unseen = (send(here, keys[other], one, EXPLAIN, **more).json for one in (text, never))
    assert (seen["cached_tokens"], seen["reason"], seen["difference"]) == (0, "first_seen", None)
    assert seen.keys() == unseen.keys()
    assert cached_tokens(send(here, keys[other], text, **more)) == 0


def test_a_salt_narrows_a_group(locked: tuple[LiveServer, dict[str, str]]) -> None:
    here, keys = locked
    text = "Salted. " + TEXT
    send(here, keys["alice"], text, cache_salt="pepper")
    assert cached_tokens(send(here, keys["bob"], text)) == 0
    assert cached_tokens(send(here, keys["bob"], text, cache_salt="pepper")) > 0


def test_what_differs_is_shown_without_the_text_that_another_key_may_have_sent(
    locked: tuple[LiveServer, dict[str, str]],
) -> None:
    here, keys = locked
    text = "The password of the day is {}, and that is all there is to be said of it."
    send(here, keys["alice"], text.format("swordfish"))
    told = send(here, keys["bob"], text.format("herring"), EXPLAIN).json
    assert (told["reason"], [*told["difference"]]) == ("diverged", ["position"])
    ran = send(here, keys["bob"], text.format("mackerel"))
    found = here.get(f"/v1/requests/{ran.headers['x-request-id']}/cache", x_api_key=keys["bob"])
    assert [*found.json["prompts"][0]["difference"]] == ["position"]
    assert "sword" not in found.data.decode() + json.dumps(told)


def test_what_a_request_found_is_still_told_to_its_own_key_alone(locked: tuple[LiveServer, dict[str, str]]) -> None:
    here, keys = locked
    ran = send(here, keys["alice"], "Told to alice. " + TEXT).headers["x-request-id"]
    assert here.get(f"/v1/requests/{ran}/cache", x_api_key=keys["alice"]).status == 200
    assert here.get(f"/v1/requests/{ran}/cache", x_api_key=keys["bob"]).status == 404


def test_a_server_has_one_group_where_the_operator_says_so(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    secrets = {name: add(path, name, group) for name, group in {"one": None, "two": None, "away": "alone"}.items()}
    with house(keys_file=path, cache_group="everybody") as here:
        send(here, secrets["one"], TEXT)
        assert cached_tokens(send(here, secrets["two"], TEXT)) > 0
        assert cached_tokens(send(here, secrets["away"], TEXT)) == 0


def test_a_group_is_listed_and_changed_and_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    where = ["--keys-file", str(tmp_path / "keys.json")]
    add(tmp_path / "keys.json", "alice", "team-a")

    def group() -> str:
        listed = CliRunner().invoke(app, ["keys", "list", "--json", *where])
        return str(json.loads(listed.stdout)[0]["cache_group"])

    assert group() == "team-a"
    assert "team-a" in CliRunner().invoke(app, ["keys", "list", *where]).stdout
    assert CliRunner().invoke(app, ["keys", "group", "alice", "team-b", *where]).exit_code == 0
    assert group() == "team-b"
    assert CliRunner().invoke(app, ["keys", "group", "alice", *where]).exit_code == 0
    assert group() == ""
    for name in ("a/salt:b", "tenant:alice", "x" * 65, ".", "ä"):
        with raises_code(ConfigError, "invalid_cache_group"):
            CliRunner().invoke(app, ["keys", "group", "alice", name, *where], catch_exceptions=False)
    with raises_code(ConfigError, "unknown_key"):
        CliRunner().invoke(app, ["keys", "group", "zoe", "a", *where], catch_exceptions=False)
