"""Promises about looking: nothing is drawn without a reader, and what costs a client its cache is named to it."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from quire.cli.shared.found_servers import admin_request
from quire.cli.watch.watch_source import WatchSource
from tests.support.fleet.prefix_corpus import RULES
from tests.support.servers.guarded_prompts import TEMPLATES
from tests.support.servers.live_server import Server, oracle, until

WARNING = "x-quire-prefix-warning"
SIZES = ("--sequence-tokens", "4096", "--blocks", "2048", "--prompt-tokens", "512")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("watched")
    template = folder / "template.jinja"
    template.write_text(TEMPLATES[""])
    with oracle(folder, *SIZES, "--template", str(template)) as made:
        yield made


def num_drawn(server: Server) -> int:
    """Pictures that its worker has made, as the operator's socket counts them."""
    told: Any = admin_request(server.admin_path, "GET", "/stats")
    return int(told["models"][0]["engine"]["num_snapshots"])


def test_nothing_is_drawn_while_no_reader_watches(server: Server) -> None:
    server.complete("one two three")
    assert num_drawn(server) == 0
    source = WatchSource(server.url, server.admin_path)
    with closing(source.snapshots()) as pictures:
        until(lambda: b'"pool":{' in next(pictures).replace(b" ", b""))
    server.complete("one two three")  # the count comes with a step
    after = num_drawn(server)
    assert after > 0
    server.complete("four five six")
    assert num_drawn(server) <= after + 1, "one more at most, of before the reader left"


def test_a_clock_in_a_system_text_is_named_with_what_it_costs(server: Server) -> None:
    for minute in range(6):
        system = {"role": "system", "content": f"The time is 08:{minute:02}:00.\n{RULES}"}
        body = {"model": "oracle", "max_tokens": 2, "messages": [system, {"role": "user", "content": f"{minute}?"}]}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.data
    assert answer.headers[WARNING].startswith("kind=times; tokens=")
    (named,) = server.ask("GET", "/v1/cache/warnings").json["data"]
    assert named["line"] == "The time is 08:05:00."
    assert named["num_lost_tokens"] > 0
