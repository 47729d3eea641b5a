"""Why a prompt is not in the cache, over HTTP: asked alone, beside an answer, and by `quire explain`."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from quire.api.access.keys import add_key
from quire.cli import app
from quire.cli.chat.explain import body_of
from quire.errors import ConfigError, RequestError
from tests.support.errors import raises_code
from tests.support.servers.local_api import LiveServer, house
from tests.support.servers.talkers import talker

EXPLAIN = "/v1/cache/explain"
TEXT = "the cat sat on the mat and looked at the dog, who did not look back at all"


def prompt(text: Any, **more: Any) -> dict[str, Any]:
    return {"model": "oracle", "prompt": text, "max_tokens": 2, "temperature": 0.0, **more}


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text} for text in texts]
    return {"model": "oracle", "messages": messages, "max_tokens": 2, "temperature": 0.0, **more}


def test_a_prompt_is_first_seen_then_found_then_different(here: LiveServer) -> None:
    mine = {"cache_salt": "first seen"}
    assert here.post(EXPLAIN, prompt(TEXT, **mine)).json["reason"] == "first_seen"
    here.post("/v1/completions", prompt(TEXT, **mine))
    again = here.post(EXPLAIN, prompt(TEXT, **mine)).json
    ids = here.post("/tokenize", {"model": "oracle", "prompt": TEXT}).json["tokens"]
    assert again["object"] == "cache.explanation"
    assert again["model"] == "oracle"
    assert (again["reason"], again["prompt_tokens"]) == ("too_short", len(ids))
    assert again["cached_tokens"] == (len(ids) - 1) // 4 * 4
    changed = [*ids[:9], 65, *ids[10:]]
    told = here.post(EXPLAIN, prompt(changed, **mine)).json
    assert (told["reason"], told["cached_tokens"], told["difference"]["position"]) == ("diverged", 8, 9)
    assert (told["difference"]["token_id"], told["difference"]["cached_token_id"]) == (65, ids[9])
    assert told["difference"]["before"] + told["difference"]["cached_after"] in TEXT
    assert told["difference"]["cached_after"].startswith(told["difference"]["cached_token"])


def test_a_conversation_is_explained_as_it_would_be_asked(here: LiveServer) -> None:
    first, second = "tell me about the cat on the mat", "and then about the dog"
    here.post("/v1/chat/completions", chat(first, cache_salt="talk"))
    assert here.post(EXPLAIN, chat(first, cache_salt="talk")).json["reason"] == "too_short"
    told = here.post(EXPLAIN, chat(first, second, cache_salt="talk", stream=True)).json
    assert told["cached_tokens"] >= 8
    assert told["reason"] in ("diverged", "first_seen")
    usage = here.post("/v1/chat/completions", chat(first, second, cache_salt="talk")).json["usage"]
    assert usage["prompt_tokens"] == told["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == told["cached_tokens"]


def test_an_answer_says_why_where_it_is_asked_to(here: LiveServer) -> None:
    asked = {"cache_salt": "beside", "cache_explain": True}
    whole = here.post("/v1/completions", prompt([TEXT, TEXT[:40]], **asked)).json["usage"]["prompt_tokens_details"]
    first, _second = whole["cache_misses"]
    num_lost = (len(here.post("/tokenize", prompt(TEXT)).json["tokens"]) - 1) // 4 * 4
    assert first == {
        "cached_tokens": 0,
        "reason": "first_seen",
        "position": None,
        "part": None,
        "lost_tokens": num_lost,
    }
    told = here.post(EXPLAIN, prompt("the cat sat on the rug and so on", cache_salt="beside")).json
    body = prompt("the cat sat on the rug and so on", **asked, stream=True, stream_options={"include_usage": True})
    (last,) = [one["usage"] for one in here.post("/v1/completions", body).events if one["usage"]]
    (miss,) = last["prompt_tokens_details"]["cache_misses"]
    assert miss == {
        "cached_tokens": told["cached_tokens"],
        "reason": "diverged",
        "position": told["difference"]["position"],
        "part": {"kind": "text", "index": 0, "name": None},
        "lost_tokens": told["lost_tokens"],
    }
    plain = here.post("/v1/completions", prompt(TEXT)).json["usage"]["prompt_tokens_details"]
    assert list(plain) == ["cached_tokens", "cache_write_tokens"]


def test_the_sdk_passes_the_field_and_shows_the_reason(here: LiveServer) -> None:
    sdk = openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0)
    extra = {"cache_explain": True, "cache_salt": "sdk"}
    done = sdk.chat.completions.create(**chat("hello, cat on the mat"), extra_body=extra)
    assert done.usage is not None
    assert done.usage.prompt_tokens_details is not None
    (miss,) = done.usage.prompt_tokens_details.model_dump()["cache_misses"]
    assert miss["reason"] == "first_seen"


def test_what_is_cached_for_another_model_of_the_server_is_said(here: LiveServer) -> None:
    here.post("/v1/completions", prompt(TEXT, cache_salt="two", model="other"))
    told = here.post(EXPLAIN, prompt(TEXT, cache_salt="two")).json
    assert (told["reason"], told["differs"], told["other_model"]) == ("other_namespace", ["model"], "other")
    assert here.post(EXPLAIN, prompt(TEXT, cache_salt="three")).json["reason"] == "first_seen"


def test_an_evicted_prompt_says_how_long_ago() -> None:
    with house(models={"oracle": talker(num_blocks=32)}) as one:
        one.post("/v1/completions", prompt(TEXT))
        for at in range(6):
            one.post("/v1/completions", prompt(f"{at} " + TEXT[::-1]))
        told = one.post(EXPLAIN, prompt(TEXT)).json
        assert told["reason"] == "evicted"
        assert 0 <= told["evicted_seconds_ago"] < 60


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (prompt([TEXT, TEXT]), "prompt"),
        ({"model": "oracle"}, "prompt"),
        (prompt(""), "prompt"),
        (chat(), "messages"),
        (prompt(TEXT, cache_salt=""), "cache_salt"),
        (prompt(TEXT, model="no such"), "model"),
        (prompt([1 << 30]), None),
        (prompt([5] * 600), None),
        (prompt(TEXT, cache_explain=True, prompt_logprobs=1), "cache_explain"),
        (prompt(TEXT, cache_explain="yes"), "cache_explain"),
    ],
)
def test_what_could_not_be_asked_cannot_be_explained(here: LiveServer, body: dict[str, Any], param: str | None) -> None:
    told = here.post(EXPLAIN, body)
    assert told.status in (400, 404)
    assert told.json["error"]["param"] == param


def test_only_the_own_tenant_is_looked_at_and_tokens_are_charged(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    one, two = add_key(file, "one"), add_key(file, "two", tokens_per_minute=60)
    with house(keys_file=file) as locked:
        assert locked.post(EXPLAIN, prompt(TEXT)).status == 401
        locked.post("/v1/completions", prompt(TEXT), x_api_key=one)
        assert locked.post(EXPLAIN, prompt(TEXT), x_api_key=one).json["reason"] == "too_short"
        theirs = locked.post(EXPLAIN, prompt(TEXT), x_api_key=two)
        assert (theirs.json["cached_tokens"], theirs.json["reason"]) == (0, "first_seen")
        assert int(theirs.headers["x-ratelimit-remaining-tokens"]) <= 60 - theirs.json["prompt_tokens"] + 1
        statuses = [locked.post(EXPLAIN, prompt(TEXT), x_api_key=two).status for _ in range(4)]
        assert statuses[-1] == 429


def test_a_person_reads_where_the_prompt_differs(here: LiveServer, tmp_path: Path) -> None:
    here.post("/v1/completions", prompt(TEXT, cache_salt="cli"))
    file = tmp_path / "body.json"
    file.write_text(json.dumps(prompt(TEXT.replace("mat", "r\x1bg"), cache_salt="cli")))
    done = CliRunner().invoke(app, ["explain", str(file), "--server", here.url])
    assert done.exit_code == 0, done.output
    first, second, *rest = done.stdout.splitlines()
    assert "tokens are cached" in first
    assert second.startswith("diverged: the prompt differs from what is cached at token ")
    assert any(line.startswith("  prompt  ") and "[" in line for line in rest)
    assert any(line.startswith("  cached  ") and "[" in line for line in rest)
    assert "\x1b" not in done.stdout
    as_json = json.loads(CliRunner().invoke(app, ["explain", str(file), "--server", here.url, "--json"]).stdout)
    assert as_json["reason"] == "diverged"


def test_a_request_that_ran_is_explained_by_its_id(here: LiveServer) -> None:
    here.post("/v1/completions", prompt(TEXT, cache_salt="ran"))
    answer = here.post("/v1/completions", prompt(TEXT.replace("mat", "rug"), cache_salt="ran"))
    for name in (answer.headers["x-request-id"], answer.json["id"]):
        done = CliRunner().invoke(app, ["explain", "--request", name, "--server", here.url])
        assert done.exit_code == 0, done.output
        head, _, cached, why, *rest = done.stdout.splitlines()
        assert head.startswith(f"request {answer.headers['x-request-id']}, oracle, ")
        assert "tokens are cached; " in cached
        assert why.endswith(", in the prompt")
        assert any(set(line) <= {" ", "^"} and "^" in line for line in rest)
    for words in ([], ["file", "--request", "a"]):
        with raises_code(ConfigError, "invalid_config"):
            CliRunner().invoke(app, ["explain", *words], catch_exceptions=False)
    with raises_code(RequestError, "request_not_found"):
        CliRunner().invoke(app, ["explain", "--request", "no-such", "--server", here.url], catch_exceptions=False)


def test_plain_text_and_saved_messages_are_taken_too(here: LiveServer, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("nobody has ever said this before\n")
    words = ["--server", here.url, "--model", "oracle"]
    done = CliRunner().invoke(app, ["explain", str(file), *words])
    assert "first_seen: " in done.stdout
    done = CliRunner().invoke(app, ["explain", "-", *words], input='[{"role": "user", "content": "hello"}]')
    assert " tokens are cached\n" in done.stdout
    assert body_of('{"a": 1}') == {"prompt": '{"a": 1}'}
    assert body_of("[]") == {"prompt": "[]"}


def test_what_cannot_be_asked_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, code in (("missing", "file_not_readable"), ("bytes", "prompt_not_utf8")):
        with raises_code(ConfigError, code):
            CliRunner().invoke(app, ["explain", str(tmp_path / name)], catch_exceptions=False)
    (tmp_path / "text").write_text("hello")
    with raises_code(ConfigError, "server_unreachable"):
        words = ["explain", str(tmp_path / "text"), "--server", "http://127.0.0.1:1"]
        CliRunner().invoke(app, words, catch_exceptions=False)
