"""What a request found in the cache, told with its answer and afterwards: a header, a record of it, and counts."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.api.access.keys import add_key
from quire.client.prefix.reuse_log import Miss
from tests.api.dialects.test_tools import tool_talker
from tests.support.servers.local_api import LiveServer, Reply, house
from tests.support.servers.talkers import paced_talker, talker

TEXT = "the cat sat on the mat and looked at the dog, who did not look back at all"
PRIVATE = "a word that only one tenant knows"
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": TEXT, "max_tokens": 2}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}),
    "responses": ("/v1/responses", {"input": TEXT, "max_output_tokens": 2}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}),
}


def prompt(text: Any, **more: Any) -> dict[str, Any]:
    return {"model": "oracle", "prompt": text, "max_tokens": 2, "temperature": 0.0, **more}


def reuse_of(here: LiveServer, answer: Reply, **headers: str) -> Any:
    return here.get(f"/v1/requests/{answer.headers['x-request-id']}/cache", **headers).json


def told(answer: Reply) -> dict[str, str]:
    return dict(one.split("=") for one in answer.headers["x-quire-cache"].split("; "))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("dialect", BODIES)
def test_every_answer_says_what_was_found_and_its_record_says_more(dialect: str, is_streamed: bool) -> None:
    path, fields = BODIES[dialect]
    body = {"model": "oracle", "stream": is_streamed, **fields}
    with house() as here:
        first, second = here.post(path, body), here.post(path, body)
        assert (first.status, second.status) == (200, 200)
        num_prompt = int(told(first)["prompt"])
        assert told(first) == {"cached": "0", "prompt": str(num_prompt), "reason": "first_seen"}
        num_whole = (num_prompt - 1) // 4 * 4
        assert told(second) == {"cached": str(num_whole), "prompt": str(num_prompt), "reason": "too_short"}
        found = reuse_of(here, first)
        assert (found["object"], found["model"]) == ("cache.reuse", "oracle")
        (one,) = found["prompts"]
        assert (one["reason"], one["prompt_tokens"], one["cached_tokens"]) == ("first_seen", num_prompt, 0)
        assert one["lost_tokens"] == num_whole
        (one,) = reuse_of(here, second)["prompts"]
        assert (one["cached_tokens"], one["lost_tokens"]) == (num_whole, 0)
        if not is_streamed:
            assert here.get(f"/v1/requests/{first.json['id']}/cache").json["prompts"] == found["prompts"]


def test_several_prompts_have_a_record_each_and_a_header_of_their_sums() -> None:
    with house() as here:
        here.post("/v1/completions", prompt(TEXT))
        answer = here.post("/v1/completions", prompt([TEXT, "a dog", TEXT.replace("mat", "rug")]))
        found = reuse_of(here, answer)["prompts"]
        assert [one["reason"] for one in found] == ["too_short", "first_seen", "diverged"]
        assert found[2]["part"] == {"kind": "text", "index": 2, "name": None}
        sums = {"cached": sum(one["cached_tokens"] for one in found), "prompt": sum(o["prompt_tokens"] for o in found)}
        assert told(answer) == {name: str(number) for name, number in sums.items()} | {"prompts": "3"}


def test_whose_prompt_is_computed_for_its_log_probabilities_is_unknown() -> None:
    with house() as here:
        here.post("/v1/completions", prompt(TEXT))
        answer = here.post("/v1/completions", prompt(TEXT, prompt_logprobs=1))
        (one,) = reuse_of(here, answer)["prompts"]
        assert (one["reason"], one["lost_tokens"]) == ("unknown", 0)
        assert set(told(answer)) == {"prompt", "reason"}


def test_another_tenants_request_is_one_that_never_was_and_the_operator_reads_no_text(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    one, two, boss = add_key(file, "one"), add_key(file, "two"), add_key(file, "boss", admin=True)
    with house(keys_file=file) as here:
        here.post("/v1/completions", prompt(f"{PRIVATE} is cat and the rest"), x_api_key=one)
        answer = here.post("/v1/completions", prompt(f"{PRIVATE} is dog and the rest"), x_api_key=one)
        path = f"/v1/requests/{answer.headers['x-request-id']}/cache"
        assert here.get(path).status == 401
        theirs, nobodys = here.get(path, x_api_key=two), here.get("/v1/requests/no-such/cache", x_api_key=two)
        assert (theirs.status, theirs.code, nobodys.status) == (404, "request_not_found", 404)
        assert theirs.data.replace(answer.headers["x-request-id"].encode(), b"no-such") == nobodys.data
        (own,) = here.get(path, x_api_key=one).json["prompts"]
        assert PRIVATE[-8:] in own["difference"]["before"]
        seen = here.get(path, x_api_key=boss)
        (by_boss,) = seen.json["prompts"]
        assert (by_boss["reason"], by_boss["lost_tokens"]) == ("diverged", own["lost_tokens"])
        assert by_boss["difference"] == {"position": own["difference"]["position"]}
        assert PRIVATE.split()[1] not in seen.data.decode()


def test_what_was_lost_is_counted_by_reason(tmp_path: Path) -> None:
    with house() as here:
        answers = [here.post("/v1/completions", prompt(text)) for text in (TEXT, TEXT, TEXT.replace("mat", "rug"))]
        lost = [reuse_of(here, answer)["prompts"][0]["lost_tokens"] for answer in answers]
        page = here.get("/metrics").data.decode().splitlines()
        where = 'engine="0",model_name="oracle"'
        for reason, num_lost in (("first_seen", lost[0]), ("too_short", 0), ("diverged", lost[2])):
            assert f'quire:prefix_tokens_lost_total{{{where},reason="{reason}"}} {float(num_lost)}' in page
            assert f'quire:prefix_misses_total{{{where},reason="{reason}"}} 1.0' in page
        log = here.admission.reuse_log
        now_s = log.find(answers[0].headers["x-request-id"])[0].at_s
        assert set(log.misses(now_s)) == {
            Miss("first_seen", lost[0], 1),
            Miss("diverged", lost[2], 1),
            Miss("too_short", 0, 1),
        }


def test_who_waited_for_a_block_lost_nothing_by_it() -> None:
    opened, runner = paced_talker(max_step_tokens=20)
    with house(models={"oracle": opened}) as here:
        first, second = here.connection(), here.connection()
        for at, connection in enumerate((first, second)):
            connection.request("POST", "/v1/completions", json.dumps(prompt(TEXT)))
            here.wait_until_asked(at + 1)
        assert runner.is_waiting.wait(60)
        here.wait_until(lambda: all(record.handles for record, _ in here.admission.open_requests.values()))
        runner.let_go()
        ids = [connection.getresponse().headers["x-request-id"] for connection in (first, second)]
        found = [here.get(f"/v1/requests/{one}/cache").json["prompts"][0] for one in ids]
        assert sorted(one["reason"] for one in found) == ["computing", "first_seen"]
        waited = next(one for one in found if one["reason"] == "computing")
        assert (waited["lost_tokens"], waited["cached_tokens"]) == (0, (waited["prompt_tokens"] - 1) // 4 * 4)
        first.close()
        second.close()


def test_one_that_ends_while_its_prompt_is_computed_is_recorded_too() -> None:
    opened, runner = paced_talker(max_step_tokens=20)
    with house(models={"oracle": opened}) as here:
        connection = here.connection()
        connection.request("POST", "/v1/completions", json.dumps(prompt(TEXT)))
        here.wait_until(lambda: here.states() == ["waiting"])
        assert runner.is_waiting.wait(60)
        runner.allow(1)
        here.wait_until(lambda: here.states() == ["running"])
        connection.close()
        here.wait_until(lambda: not here.admission.open_requests)
        assert [one.reason for one in here.admission.reuse_log.misses(0.0)] == ["first_seen"]
        runner.let_go()


def test_a_refused_request_leaves_no_record() -> None:
    with house(models={"oracle": talker(num_blocks=8)}) as here:
        answer = here.post("/v1/completions", prompt(TEXT * 6))
        assert answer.status == 400
        assert "x-quire-cache" not in answer.headers
        assert len(here.admission.reuse_log) == 0


LONG = "and the books stand in rows that nobody has counted yet"
CHANGED = LONG.replace("nobody", "nurses")
TOOLS = [
    {"name": name, "description": f"what {name} says", "schema": {"type": "object", "properties": {}}}
    for name in ("alpha", "bravo", "carol")
]


def chat_body(system: str, turns: list[tuple[str, str]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    given = [
        {"function": {"name": one["name"], "description": one["description"], "parameters": one["schema"]}}
        for one in tools
    ]
    messages = [{"role": "system", "content": system}, *[{"role": role, "content": text} for role, text in turns]]
    return {"messages": messages, "tools": [{"type": "function", **one} for one in given], "max_tokens": 2}


def responses_body(system: str, turns: list[tuple[str, str]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    given = [
        {"type": "function", "name": one["name"], "description": one["description"], "parameters": one["schema"]}
        for one in tools
    ]
    items = [{"role": role, "content": text} for role, text in turns]
    return {"instructions": system, "input": items, "tools": given, "max_output_tokens": 2}


def messages_body(system: str, turns: list[tuple[str, str]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    given = [{"name": one["name"], "description": one["description"], "input_schema": one["schema"]} for one in tools]
    turns_told = [{"role": role, "content": text} for role, text in turns]
    return {"system": system, "messages": turns_told, "tools": given, "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "make", "first_message"),
    [
        ("/v1/chat/completions", chat_body, 1),
        ("/v1/responses", responses_body, 0),
        ("/v1/messages", messages_body, 0),
    ],
)
def test_a_difference_falls_in_a_tool_a_message_or_the_system_text(path: str, make: Any, first_message: int) -> None:
    turns = [("user", f"one {LONG}"), ("assistant", f"two {LONG}"), ("user", f"also three {LONG}")]
    other_turns = [turns[0], turns[1], ("user", f"also three {CHANGED}")]
    with house(models={"oracle": tool_talker()}) as here:

        def asked(*told: Any) -> Any:
            answer = here.post(path, {"model": "oracle", **make(*told)})
            assert answer.status == 200, answer.data
            return reuse_of(here, answer)["prompts"][0]

        asked(f"system {LONG}", turns, TOOLS)
        parts = [
            asked(f"system {LONG}", turns, [TOOLS[0], TOOLS[2], TOOLS[1]]),
            asked(f"system {CHANGED}", turns, TOOLS),
            asked(f"system {LONG}", other_turns, TOOLS),
        ]
        assert [one["reason"] for one in parts] == ["diverged"] * 3
        last = first_message + 2
        assert [one["part"] for one in parts] == [
            {"kind": "tool", "index": 1, "name": "carol"},
            {"kind": "system", "index": 0, "name": None},
            {"kind": "message", "index": last, "name": "user"},
        ]


def test_an_answer_of_several_blocks_counts_as_its_own_turn() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": f"{LONG} first"}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": f"one {LONG}"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "alpha", "input": {}}]},
        {"role": "user", "content": [result, {"type": "text", "text": f"{LONG} then {LONG}"}]},
    ]
    body = {"model": "oracle", "messages": turns, "max_tokens": 2}
    with house(models={"oracle": tool_talker()}) as here:
        here.post("/v1/messages", body)
        turns[2]["content"] = [result, {"type": "text", "text": f"{LONG} that {LONG}"}]
        (found,) = reuse_of(here, here.post("/v1/messages", body))["prompts"]
        assert (found["reason"], found["part"]) == ("diverged", {"kind": "message", "index": 2, "name": "user"})
