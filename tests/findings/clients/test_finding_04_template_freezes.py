"""Finding 4: a model's chat template froze the whole server, or filled its memory, at load already.

Each template is loaded in a process that can be ended, because without the fix nothing else ends it.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

SQUARING = "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"
FILLING = "{{ (('a' * 1000000).replace('a', 'a' * 1000)) | length }}"

LOAD = """
import json, os, resource, sys, threading, time
from quire.text.chat.rendering.template import ChatTemplate

resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.RLIM_INFINITY))
said = []

def load():
    try:
        ChatTemplate(sys.argv[1], {}).render([{"role": "user", "content": "hello"}])
        said.append("rendered")
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")

thread = threading.Thread(target=load, daemon=True)
thread.start()
num_rounds = 0
while thread.is_alive():
    time.sleep(0.01)
    num_rounds += 1
# Not getrusage: what it calls the most memory of a process begins with that of whoever started it.
peak = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
print(json.dumps({"said": said, "rounds": num_rounds, "peak_mb": peak // 1024}), flush=True)
"""


def loaded(source: str) -> dict[str, Any] | None:
    """What came of a template, or none if the process had to be ended."""
    try:
        run = subprocess.run([sys.executable, "-c", LOAD, source], capture_output=True, text=True, timeout=40)
    except subprocess.TimeoutExpired:
        return None
    assert run.returncode == 0, run.stderr
    told: dict[str, Any] = json.loads(run.stdout)
    return told


@pytest.mark.parametrize("source", [SQUARING, f"{{% if messages[0].content == 'hello' %}}{SQUARING}{{% endif %}}"])
def test_a_number_that_grows_without_end_stops_nobody_but_its_chat(source: str) -> None:
    told = loaded(source)
    assert told is not None, "the template froze the process, for more than 40 s"
    assert told["said"][0].startswith("TemplateError")
    assert "2 s" in told["said"][0]
    assert told["rounds"] > 1


def test_a_text_made_of_copies_does_not_fill_the_servers_memory() -> None:
    told = loaded(FILLING)
    assert told is not None
    assert told["peak_mb"] < 500
    assert told["said"][0].startswith("TemplateError")
    assert "bytes" in told["said"][0]
