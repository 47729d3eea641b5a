"""Who is next, over HTTP: a server with four places and slow steps, one request that fills them, and those who wait."""

from concurrent.futures import Future
from pathlib import Path

from quire.api.keys import add_key
from tests.promises.conftest import LONG_ENOUGH, Busy
from tests.promises.servers import Answer, Server, oracle, until

COMPLETE = "/v1/completions"
LONG = 16_000
"""Tokens, a hundredth of a second each."""
HIGH, LOW = {"priority": -1}, {"priority": 1}


def body(prompt: str, max_tokens: int = 1, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}


class Line:
    """Requests that wait behind one that takes all places, in a known order."""

    def __init__(self, server: Server, key: str, *, places: int = 4) -> None:
        self.server = server
        self.waiting: dict[str, Future[Answer]] = {}
        # It would run for minutes: however slow the machine is, everybody has joined before it is ended.
        self._first = server.begun(COMPLETE, body("the one in front", LONG, n=places), key)
        until(lambda: "running" in server.states())

    def join(self, name: str, key: str, **more: object) -> None:
        """One more waits; the next comes only after it does."""
        self.waiting[name] = self.server.later(COMPLETE, body(name, **more), key, name)  # type: ignore[arg-type]
        until(lambda: len([state for state in self.server.states() if state != "running"]) >= len(self.waiting))

    def end(self) -> None:
        """The one in front leaves."""
        self._first.close()

    def order(self) -> list[str]:
        """Who was done when, as the server saw it: threads of this process may wake in another order."""
        self.end()
        assert {one.result().status for one in self.waiting.values()} <= {200}
        until(lambda: self.waiting.keys() <= set(self.server.logged()))
        return [name for name in self.server.logged() if name in self.waiting]


def test_a_priority_is_a_head_start(busy: Busy) -> None:
    line = Line(busy.server, busy.urgent)
    line.join("low", busy.urgent, n=4, **LOW)
    line.join("normal", busy.urgent, n=4)
    line.join("high", busy.urgent, n=4, **HIGH)
    assert line.order() == ["high", "normal", "low"]


def test_a_head_start_of_no_seconds_overtakes_nobody(tmp_path: Path) -> None:
    """A class is worth its seconds and no more: who comes later than that comes later."""
    key = add_key(tmp_path / "keys.json", "one", max_class="high")
    settings = ("--running", "4", "--step-s", "0.01", "--head-start-high-s", "0", "--head-start-normal-s", "0")
    with oracle(tmp_path, *settings, *LONG_ENOUGH, keys=tmp_path / "keys.json") as server:
        line = Line(server, key)
        line.join("low", key, n=4, **LOW)
        line.join("normal", key, n=4)
        line.join("high", key, n=4, **HIGH)
        assert line.order() == ["low", "normal", "high"]


def test_the_tenant_that_has_received_least_goes_first(busy: Busy) -> None:
    """One that floods does not keep another waiting behind all of its own."""
    line = Line(busy.server, busy.urgent)
    for at in range(5):
        line.join(f"flood-{at}", busy.urgent, n=4)
    line.join("other", busy.usual, n=4)
    assert line.order().index("other") <= 1


def test_a_request_that_does_not_fit_is_not_skipped(busy: Busy) -> None:
    line = Line(busy.server, busy.urgent, places=3)
    line.join("large", busy.urgent, n=4)
    line.join("small", busy.urgent)
    assert line.order() == ["large", "small"]


def test_a_full_queue_turns_newcomers_away_at_once_with_a_reason(busy: Busy) -> None:
    line = Line(busy.server, busy.urgent)
    flood = [busy.server.later(COMPLETE, body(f"flood {at}", n=4), busy.urgent) for at in range(24)]
    until(lambda: any(one.done() for one in flood))
    line.end()
    turned_away = [one.result() for one in flood if one.result().status != 200]
    assert turned_away
    for one in turned_away:
        assert one.status in (429, 503)
        assert int(one.headers["retry-after"]) >= 1
        assert one.json["error"]["message"]
    assert line.order() == []
