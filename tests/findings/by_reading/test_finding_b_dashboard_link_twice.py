"""The link in a browser's command line can be read by other users: when it is used twice, what it opened is closed."""

from collections.abc import Iterator
from http.client import HTTPConnection
from threading import Thread

import pytest

from quire.cli.watch.dashboard_server import LOOPBACK, DashboardServer
from quire.cli.watch.watch_source import WatchSource
from tests.support.machine.patience import PATIENCE_S


@pytest.fixture
def server() -> Iterator[DashboardServer]:
    with DashboardServer(WatchSource("http://127.0.0.1:1")) as made:
        thread = Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join(PATIENCE_S)


def ask(server: DashboardServer, path: str, token: str = "") -> tuple[int, str, bytes]:
    connection = HTTPConnection(LOOPBACK, server.server_address[1], timeout=PATIENCE_S)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, answer.getheader("location") or "", answer.read()
    finally:
        connection.close()


def test_a_link_that_is_used_twice_says_why_and_ends_the_token(server: DashboardServer) -> None:
    link = server.opening_url.removeprefix(server.base)
    status, location, _ = ask(server, link)
    token = location.partition("#key=")[2]
    assert status == 303
    assert ask(server, "/v1/admin/watch", token)[0] == 503, "the token is good, there is no server behind it"
    status, location, body = ask(server, link)
    assert (status, location) == (410, "")
    assert b"another user" in body
    assert ask(server, "/v1/admin/watch", token)[0] == 401


def test_a_guess_ends_nothing(server: DashboardServer) -> None:
    token = server.token
    assert ask(server, "/open/a-guess")[0] == 410
    assert ask(server, "/v1/admin/watch", token)[0] == 503
