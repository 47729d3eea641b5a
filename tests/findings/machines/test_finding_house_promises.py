"""Promises that no user could reach: why a prompt missed, the whole pool, and bounds that do not hold."""

import json
from pathlib import Path

from tests.support.servers.local_api import house
from tests.support.servers.talkers import talker

ROOT = Path(__file__).parents[3]
TEXT = "the cat sat on the mat and looked at the dog"


def test_a_client_can_ask_why_its_prompt_is_not_in_the_cache() -> None:
    with house() as here:
        asked = {"model": "oracle", "prompt": TEXT, "max_tokens": 2}
        here.post("/v1/completions", asked)
        told = here.post("/v1/cache/explain", {**asked, "prompt": TEXT.replace("mat", "rug")})
        assert told.status == 200
        assert told.json["reason"] == "diverged"
        assert told.json["difference"]["position"] > 0
        beside = here.post("/v1/completions", {**asked, "cache_explain": True}).json["usage"]["prompt_tokens_details"]
        assert beside["cache_misses"][0]["reason"] == "too_short"


def test_a_longest_request_may_use_the_whole_pool() -> None:
    """Sixteen blocks of four tokens: nobody can pin, so nothing is kept for pins."""
    with house(models={"oracle": talker(num_blocks=16, max_sequence_tokens=64)}) as here:
        told = here.post("/v1/completions", {"model": "oracle", "prompt": [65] * 40, "max_tokens": 24})
        assert told.status == 200, told.data


def test_the_page_of_proofs_shows_every_bound_that_does_not_hold() -> None:
    folder = ROOT / "proofs" if (ROOT / "proofs").is_dir() else ROOT / "benchmarks"  # where they stood before
    page = (folder / "README.md").read_text()
    for path in sorted((folder / "results").glob("*.json")):
        for key in json.loads(path.read_text()).get("broken", ()):
            assert f"`{key}`" in page, f"{path.name}: {key}"
