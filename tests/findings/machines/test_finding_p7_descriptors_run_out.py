"""More clients than descriptors: each is answered in its turn, none is cut."""

import http.client
import json
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.findings.machines.test_finding_12_descriptors import FEW, few_descriptors, status_of_health

NUM_CLIENTS = 2 * FEW


def status_of_completion(port: int) -> int | str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        body = json.dumps({"model": "oracle", "prompt": "x", "max_tokens": 8})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json", "connection": "close"})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"not answered: {type(error).__name__}"
    finally:
        connection.close()


def test_more_clients_at_once_than_descriptors_are_all_answered(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > NUM_CLIENTS
    with few_descriptors(tmp_path) as port:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            statuses = list(pool.map(status_of_completion, [port] * NUM_CLIENTS))
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) > FEW // 2
        assert status_of_health(port, 60) == 200
