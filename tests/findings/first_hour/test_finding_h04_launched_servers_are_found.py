"""The server that `quire launch` starts for an agent is found by top, dashboard and connect for as long as it is there.

The agent is a script that runs the commands a person would type beside it.
"""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

from tests.support.models.tiny_models import Tiny, write_gguf

AGENT = """#!{python}
import json, os, subprocess, sys
beside = {{**os.environ, "XDG_RUNTIME_DIR": os.environ["TEST_RUNTIME"]}}
told = {{}}
for words in (["connect", "codex"], ["top", "--once"]):
    ran = subprocess.run([sys.executable, "-m", "quire", *words], env=beside, capture_output=True, text=True)
    told[words[0]] = [ran.returncode, ran.stdout + ran.stderr]
open(os.environ["TEST_TOLD"], "w").write(json.dumps(told))
"""


def test_a_server_of_launch_is_found_by_connect_and_top(tmp_path: Path) -> None:
    program, told, runtime = tmp_path / "bin" / "aider", tmp_path / "told.json", tmp_path / "runtime"
    program.parent.mkdir()
    program.write_text(AGENT.format(python=sys.executable))
    program.chmod(stat.S_IRWXU)
    file = write_gguf(tmp_path / "tiny.gguf", Tiny(hidden=128, intermediate=128))
    environment = {
        **os.environ,
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(runtime),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "TEST_RUNTIME": str(runtime),
        "TEST_TOLD": str(told),
        "QUIRE_MEMORY": "1GiB",
    }
    words = [sys.executable, "-m", "quire", "launch", "aider", "--model", str(file)]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    for command, (code, said) in json.loads(told.read_text()).items():
        assert code == 0, (command, said)
        assert "no server of yours" not in said
    assert not list(runtime.rglob("*.sock")), "what was found is gone with its server"
