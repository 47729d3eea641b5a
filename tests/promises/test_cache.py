"""Promises about the cache: what is found, what is told when it is not, and who sees what. One real server for all."""

import json
from pathlib import Path
from random import Random
from typing import Any

from typer.testing import CliRunner

from quire import LLM, ModelSettings, SamplingParams
from quire.cli import app
from quire.core.memory import block_pool, kv_memory, prefix_tree
from tests.promises.conftest import Served
from tests.promises.registry import ROOT
from tests.support.machine.process_memory import budget_bytes

EXPLAIN = "/v1/cache/explain"
BLOCK = 32
DICE = Random("promises")


def tokens(count: int) -> list[int]:
    """Tokens nobody has sent before."""
    return [DICE.randrange(10, 250) for _ in range(count)]


def explain(served: Served, prompt: list[int], **more: Any) -> Any:
    told = served.server.post(EXPLAIN, {"model": "one", "prompt": prompt, **more}, served.alice)
    assert told.status == 200, told.data
    return told.json


def test_the_cache_works_and_when_it_does_not_the_server_says_why(served: Served, tmp_path: Path) -> None:
    """A long shared prompt is computed once; a changed one is explained to the very token, by hand and by HTTP."""
    shared, server = tokens(4 * BLOCK), served.server
    first = server.complete([*shared, *tokens(9)], served.alice, model="one").json["usage"]
    second = server.complete([*shared, *tokens(9)], served.alice, model="one").json["usage"]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 4 * BLOCK}
    assert second["prompt_tokens_details"]["cached_tokens"] == 4 * BLOCK
    changed = [*shared[:70], shared[70] ^ 1, *shared[71:], 5]
    body = {"model": "one", "prompt": changed, "cache_explain": True}
    (tmp_path / "body.json").write_text(json.dumps(body))
    words = ["explain", str(tmp_path / "body.json"), "--server", server.url, "--key", served.alice]
    page = CliRunner().invoke(app, words).stdout
    assert page.startswith(f"{2 * BLOCK} of {len(changed)} tokens are cached; {2 * BLOCK} more could have been\n")
    assert "\ndiverged: the prompt differs from what is cached at token 70, in" in page
    details = server.post("/v1/completions", body, served.alice).json["usage"]["prompt_tokens_details"]
    found = {"cached_tokens": 2 * BLOCK, "reason": "diverged", "position": 70, "lost_tokens": 2 * BLOCK}
    assert details["cache_misses"] == [{**found, "part": {"kind": "text", "index": 0, "name": None}}]


def test_a_prompt_cached_whole_leaves_its_last_token_to_compute(served: Served) -> None:
    for count in (3 * BLOCK, 3 * BLOCK + 1):
        prompt = tokens(count)
        for _ in range(2):
            usage = served.server.complete(prompt, served.alice, model="one").json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == (count - 1) // BLOCK * BLOCK


def test_a_prefix_is_computed_once_for_all_of_a_cache_group(served: Served) -> None:
    """For a key alone, and for keys that the operator has put into one group; for no other key."""
    for keys, outside in (((served.alice, served.alice), served.bob), (served.team, served.alice)):
        prompt = tokens(3 * BLOCK + 1)
        used = [served.server.complete(prompt, key, model="one").json["usage"] for key in (*keys, outside)]
        assert [one["prompt_tokens_details"]["cached_tokens"] for one in used] == [0, 3 * BLOCK, 0]


def test_there_is_no_leak_between_tenants(served: Served) -> None:
    """Neither by time, by counts, by reasons nor by text does one tenant learn what another has sent."""
    prompt = tokens(3 * BLOCK)
    served.server.complete(prompt, served.alice, model="one")
    for model in ("one", "two"):
        told = served.server.post(EXPLAIN, {"model": model, "prompt": prompt}, served.bob).json
        assert (told["cached_tokens"], told["reason"], told["difference"]) == (0, "first_seen", None)
    usage = served.server.complete(prompt, served.bob, model="one").json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    salted = explain(served, prompt, cache_salt="of alice alone")
    assert (salted["cached_tokens"], salted["reason"]) == (0, "first_seen"), "a salt keeps apart inside a tenant too"


def test_a_block_that_somebody_computes_is_computing(served: Served) -> None:
    """A prompt of many steps is asked about while it is computed."""
    seen = set()
    for _ in range(50):
        prompt = tokens(480)
        running = served.server.later(
            "/v1/completions", {"model": "one", "prompt": prompt, "max_tokens": 1}, served.alice
        )
        while not running.done():
            seen.add(explain(served, prompt)["reason"])
        if "computing" in seen:
            break
    assert "computing" in seen


def test_what_is_less_than_a_block_is_too_short(served: Served) -> None:
    told = explain(served, tokens(BLOCK))
    assert (told["cached_tokens"], told["reason"]) == (0, "too_short")


def test_what_had_to_make_room_is_evicted_and_says_how_long_ago(served: Served) -> None:
    prompt = tokens(2 * BLOCK + 1)
    served.server.complete(prompt, served.alice, model="one")
    for _ in range(40):
        if explain(served, prompt)["reason"] == "evicted":
            break
        served.server.complete(tokens(500), served.alice, model="one")
    told = explain(served, prompt)
    assert told["reason"] == "evicted"
    assert 0 <= told["evicted_seconds_ago"] < 3600


def test_what_differs_says_where_and_shows_both_texts(served: Served) -> None:
    text = "hello world, this is what both say; " * 2 + "{} and then the same again, long enough for a block"
    key, server = served.alice, served.server
    server.complete(text.format("mine"), key, model="one")
    told = server.post(EXPLAIN, {"model": "one", "prompt": text.format("yours")}, key).json
    found = told["difference"]
    assert told["reason"] == "diverged"
    assert (found["token"], found["cached_token"]) == ("y", "m")
    assert found["before"] + found["after"] in text.format("yours")
    assert found["before"] + found["cached_after"] in text.format("mine")


def test_what_another_model_has_says_what_differs(served: Served) -> None:
    prompt = tokens(2 * BLOCK)
    served.server.complete(prompt, served.alice, model="two")
    told = explain(served, prompt)
    assert (told["reason"], told["differs"], told["other_model"]) == ("other_namespace", ["model"], "two")


def test_what_nobody_has_sent_is_first_seen(served: Served) -> None:
    told = explain(served, tokens(2 * BLOCK))
    assert (told["cached_tokens"], told["reason"]) == (0, "first_seen")


def test_from_python_a_miss_is_explained_too(tiny_model: Path) -> None:
    # A budget is the whole process's, and other tests have left theirs in it.
    settings = ModelSettings(memory_bytes=budget_bytes(1 << 30), max_sequence_tokens=128, max_running=4, num_threads=1)
    with LLM(str(tiny_model), settings) as llm:
        prompt = tokens(BLOCK + 1)
        assert llm.explain(prompt).reason == "first_seen"
        llm.generate([prompt], SamplingParams(max_tokens=1))
        assert llm.explain(prompt).reason == "too_short"


def test_the_names_of_the_memory_are_those_the_page_gives() -> None:
    """Rows of "Names you may know": what stands on the right is there to be called."""
    rooms = [kv_memory.KVMemory, block_pool.BlockPool, prefix_tree.PrefixTree, kv_memory, block_pool]
    rows = (ROOT / "docs" / "concepts" / "kv-memory.md").read_text().partition("## Names you may know")[2]
    words = [word for row in rows.splitlines() if row.startswith("| ") for word in row.split("|")[2].split("`")[1::2]]
    assert len(words) > 12
    for word in words:
        name = word.partition("(")[0].rpartition(".")[2]
        has_it = any(hasattr(room, name) for room in rooms)
        assert has_it or name in ("usage", "BlockCopy"), word
