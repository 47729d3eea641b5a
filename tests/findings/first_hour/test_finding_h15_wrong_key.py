"""A key that the server does not know is answered on the page, not passed over."""

import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "src" / "quire" / "api" / "page"
NODE = shutil.which("node")
PROBE = """
let key = null;
globalThis.sessionStorage = { getItem: () => key, setItem: (_, given) => { key = given; } };
globalThis.fetch = async () => new Response("{}", { status: 401 });
const server = await import(process.argv[1]);
const reason = () => server.models().catch((error) => error.message);
console.log(await reason());
server.setKey("wrong");
console.log(await reason());
"""


@pytest.mark.skipif(NODE is None, reason="the page's code is run by node")
def test_a_wrong_key_is_said_to_be_unknown() -> None:
    words = [str(NODE), "--input-type=module", "-e", PROBE, str(PAGE / "server.js")]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == ["A key is required", "Unknown key"]


def test_the_dialog_shows_what_was_said() -> None:
    """Everything else of the dialog is the browser's; `make proof-first` opens it in one."""
    code = (PAGE / "main.js").read_text()
    num_calls = code.count("requestKey(") - 1
    assert num_calls == code.count("requestKey(error.message)") == 2, "one without a reason is blank"
    assert 'at("key-title").textContent = why;' in code
