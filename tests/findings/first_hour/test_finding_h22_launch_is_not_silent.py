"""`quire launch` says how long the first prompt will take, and after Ctrl-C what was done, at what speed, and whether
the task ended. The agent is a script that sends a prompt, and then gets Ctrl-C.
"""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

from tests.support.models.tiny_models import Tiny, write_gguf

AGENT = """#!{python}
import json, os, signal, sys, urllib.request
model = os.environ["AIDER_MODEL"].partition("/")[2]
body = json.dumps({{"model": model, "prompt": "one two three", "max_tokens": 3}}).encode()
headers = {{"content-type": "application/json"}}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_API_BASE"] + "/completions", body, headers)).read()
os.kill(os.getppid(), signal.SIGINT)
sys.exit(130)
"""


def test_the_first_prompt_is_estimated_and_an_interrupted_agent_is_reported(tmp_path: Path) -> None:
    program, state = tmp_path / "bin" / "aider", tmp_path / "state"
    program.parent.mkdir()
    program.write_text(AGENT.format(python=sys.executable))
    program.chmod(stat.S_IRWXU)
    file = write_gguf(tmp_path / "tiny.gguf", Tiny(hidden=128, intermediate=128))
    environment = {
        **os.environ,
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(tmp_path / "runtime"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_STATE_HOME": str(state),
        "QUIRE_MEMORY": "1GiB",
    }
    words = [sys.executable, "-m", "quire", "launch", "aider", "--model", str(file)]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 130, ran.stderr
    assert "tiny at http://127.0.0.1:" in ran.stderr
    assert "aider's first prompt has up to 2,800 tokens: up to " in ran.stderr
    assert "\n\nquire: aider was interrupted; answered 1 of 1 requests\n" in ran.stderr
    assert "prompt tokens were cached" in ran.stderr
    assert "tokens/s\n" in ran.stderr
    (speeds,) = json.loads((state / "quire" / "prompt_speeds.json").read_text()).values()
    assert list(speeds) == [str(file)]
