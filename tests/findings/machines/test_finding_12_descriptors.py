"""Finding 12: connections were not bounded by the descriptors there are: silent ones kept everybody out."""

import http.client
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.machine.spawned import LISTENING, spawned

FEW = 160


@contextmanager
def few_descriptors(folder: Path) -> Iterator[int]:
    """The port of a server that may open few files."""
    code = "import sys; from tests.support.servers.oracle_server import main; sys.exit(main(sys.argv[1:]))"
    words = ["--port", "0", "--admin-socket", str(folder / "run" / "admin.sock")]
    limited = ["sh", "-c", f'ulimit -n {FEW}; exec "$@"', "sh", sys.executable, "-c", code, *words]
    with spawned(limited, None, {**os.environ, "XDG_CONFIG_HOME": str(folder)}, stops_s=0) as server:
        yield int(server.wait_for(LISTENING))


def status_of_health(port: int, timeout_s: float) -> int | str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"not answered: {type(error).__name__}"
    finally:
        connection.close()


def test_connections_that_ask_nothing_do_not_keep_out_one_that_asks(tmp_path: Path) -> None:
    with few_descriptors(tmp_path) as port:
        assert status_of_health(port, 30) == 200
        silent = []
        try:
            for _ in range(2 * FEW):
                with suppress(OSError):
                    silent.append(socket.create_connection(("127.0.0.1", port), timeout=60))
            # Well before the heads of the silent ones are late, which is when they would be cut in any case.
            got = [status_of_health(port, 10) for _ in range(3)]
        finally:
            for wire in silent:
                wire.close()
    assert got == [200, 200, 200]
