"""Who is next, over HTTP: a server with four places and slow steps, one request that fills them, and those who wait."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from quire.api.access.keys import add_key
from tests.promises.conftest import SLOW, Busy
from tests.support.servers.live_server import Answer, Server, oracle, until

COMPLETE = "/v1/completions"
HIGH, LOW = {"priority": -1}, {"priority": 1}
FOR_EVER = 4000
"""Tokens of an answer that nobody waits for to end."""

Join = Callable[..., None]


def body(prompt: str, max_tokens: int = 1, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}


class Line:
    """Requests that wait, in a known order."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.waiting: dict[str, Future[Answer]] = {}

    def join(self, name: str, key: str, **more: Any) -> None:
        """One more waits; the next comes only after it does."""
        self.waiting[name] = self.server.later(COMPLETE, body(name, **more), key, name)
        until(lambda: self.server.states().count("waiting") >= len(self.waiting))

    def order(self) -> list[str]:
        """Who was done when, as the server saw it: threads of this process may wake in another order."""
        assert {one.result().status for one in self.waiting.values()} == {200}
        until(lambda: self.waiting.keys() <= set(self.server.logged()))
        return [name for name in self.server.logged() if name in self.waiting]


def order_of(server: Server, key: str, join: Callable[[Join], None], *, places: int = 4) -> list[str]:
    """How those end who joined while one request held this many places, once it is gone. Nobody is more urgent than
    it: whoever was would take its place."""
    line = Line(server)
    with server.occupied(body("the one in front", FOR_EVER, n=places, **HIGH), key):
        join(line.join)
    return line.order()


def three_classes(key: str) -> Callable[[Join], None]:
    """The least urgent comes first."""

    def join(one: Join) -> None:
        one("low", key, n=4, **LOW)
        one("normal", key, n=4)
        one("high", key, n=4, **HIGH)

    return join


def test_a_priority_is_a_head_start(busy: Busy) -> None:
    assert order_of(busy.server, busy.urgent, three_classes(busy.urgent)) == ["high", "normal", "low"]


def test_a_head_start_of_no_seconds_overtakes_nobody(tmp_path: Path) -> None:
    """A class is worth its seconds and no more: who comes later than that comes later."""
    keys = tmp_path / "keys.json"
    key = add_key(keys, "one", max_class="high")
    starts = ("--head-start-high-s", "0", "--head-start-normal-s", "0")
    with oracle(tmp_path, *SLOW, *starts, keys=keys) as server:
        assert order_of(server, key, three_classes(key)) == ["low", "normal", "high"]


def test_the_tenant_that_has_received_least_goes_first(busy: Busy) -> None:
    """One that floods does not keep another waiting behind all of its own."""

    def join(one: Join) -> None:
        for at in range(5):
            one(f"flood-{at}", busy.urgent, n=4)
        one("other", busy.usual, n=4)

    assert order_of(busy.server, busy.urgent, join).index("other") <= 1


def test_a_request_that_does_not_fit_is_not_skipped(busy: Busy) -> None:
    def join(one: Join) -> None:
        one("large", busy.urgent, n=4)
        one("small", busy.urgent)

    assert order_of(busy.server, busy.urgent, join, places=3) == ["large", "small"]


def test_a_full_queue_turns_newcomers_away_at_once_with_a_reason(busy: Busy) -> None:
    with busy.server.occupied(body("the one in front", FOR_EVER, n=4), busy.urgent):
        flood = [busy.server.later(COMPLETE, body(f"flood {at}", n=4), busy.urgent) for at in range(24)]
        until(lambda: sum(one.done() for one in flood) > 0)
    turned_away = [one.result() for one in flood if one.result().status != 200]
    assert turned_away
    for one in turned_away:
        assert one.status in (429, 503)
        assert int(one.headers["retry-after"]) >= 1
        assert one.json["error"]["message"]
