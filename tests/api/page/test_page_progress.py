"""The page's own code requests progress, and shows a sign of life as nothing."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.local_api import house

ROOT = Path(__file__).parents[3]
PROBE = ROOT / "tests" / "support" / "server_probe.mjs"
FOLDER = ROOT / "src" / "quire" / "api" / "page"
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="the page's code is run by node")


def calls_of(stream: bytes) -> dict[str, Any]:
    ran = subprocess.run([str(NODE), str(PROBE), str(FOLDER)], input=stream, capture_output=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


def test_progress_and_then_text_reach_the_page() -> None:
    sent = calls_of(b"data: [DONE]\n\n")["sent"]
    assert sent["return_progress"] is True
    asked = {**sent, "model": "oracle", "messages": [{"role": "user", "content": "cat " * 90}], "max_tokens": 3}
    with house() as here:
        stream = here.post("/v1/chat/completions", asked).data
    alive = b'data: {"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":null}]}\n\n'
    told = calls_of(alive + stream)
    names = [name for name, _ in told["calls"]]
    assert names == sorted(names, reverse=True)  # all progress before all deltas
    assert {"progress", "delta"} == set(names)
    last = [value for name, value in told["calls"] if name == "progress"][-1]
    assert last["processed"] == last["total"]
    assert told["reason"] == "length"
