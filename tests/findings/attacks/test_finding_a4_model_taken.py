"""One key takes a model away from all others for as long as its own stream lasts."""

import json
import threading
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from quire.api.access.keys import add_key
from tests.support.machine.patience import PATIENCE_S
from tests.support.servers.park_server import ParkServer, on_demand, park_server
from tests.support.servers.served import served

ROUTE = "/v1/completions"
LONG = 400


def body(model: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    sent = {"model": model, "prompt": "hello", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return sent | more


class OpenStream:
    """A stream that is read by a thread, and its text."""

    def __init__(self, here: ParkServer, key: str, model: str) -> None:
        self._connection = HTTPConnection("127.0.0.1", here.port, timeout=PATIENCE_S)
        sent = json.dumps(body(model, LONG, stream=True))
        self._connection.request("POST", ROUTE, sent, {"x-api-key": key, "content-type": "application/json"})
        self.has_begun = threading.Event()
        self.lines: list[str] = []
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        with closing(self._connection), self._connection.getresponse() as response:
            for line in response:
                self.lines.append(line.decode().strip())
                self.has_begun.set()

    def text(self) -> str:
        self.thread.join(PATIENCE_S)
        assert "data: [DONE]" in self.lines, self.lines[-4:]
        told = [json.loads(line.removeprefix("data: ")) for line in self.lines if line.startswith("data: {")]
        return "".join(choice["text"] for one in told for choice in one["choices"])


def test_a_keys_own_stream_is_set_aside_for_its_other_model_and_ends_as_alone(tmp_path: Path) -> None:
    """Failed: the other model came only when the stream had ended, and every other key waited as long."""
    keys = tmp_path / "keys.json"
    tight, other = add_key(keys, "tight"), add_key(keys, "other")
    with park_server(tmp_path, *on_demand("a", "b"), room=1, open_client=lambda: served(step_s=0.02)) as here:
        ((status, alone),) = here.ask((ROUTE, body("a", LONG)), key=tight)
        assert status == 200, alone
        stream = OpenStream(here, tight, "a")
        assert stream.has_begun.wait(PATIENCE_S)
        ((status, text),) = here.ask((ROUTE, body("b", 1)), key=tight)
        assert status == 200, text
        assert stream.thread.is_alive()  # b came while it was open
        assert here.ask((ROUTE, body("a", 1)), key=other)[0][0] == 200
        assert stream.text() == json.loads(alone)["choices"][0]["text"]
        assert here.told[:4] == ["+a", "+b", "-b", "-a"] or here.told[:3] == ["+a", "+b", "-b"]


def test_a_key_that_alternates_between_models_is_bounded_and_others_are_served(tmp_path: Path) -> None:
    """Failed: every request was answered, and caused a load for as long as the key went on."""
    keys = tmp_path / "keys.json"
    tight, other = add_key(keys, "tight"), add_key(keys, "other")
    with park_server(tmp_path, *on_demand("a", "b"), room=1) as here:
        codes = [here.ask((ROUTE, body(model, 1)), key=tight)[0][0] for model in "ababab"]
        assert codes == [200, 200, 200, 200, 429, 200]  # the last one is here already
        assert here.ask((ROUTE, body("a", 1)), key=other)[0][0] == 200
