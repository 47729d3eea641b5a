"""Finding A11: the preflight of an allowed origin left out a method that is a route, and headers that clients send."""

import pytest

from quire.api.access.admission import AdmissionSettings
from quire.api.access.origins import Origins
from tests.support.servers.local_api import house

PAGE = "https://app.example"
SETTINGS = AdmissionSettings(origins=Origins(allowed=frozenset({PAGE})))
PATH = "/v1/responses/resp_1"


@pytest.mark.parametrize("wanted", ["anthropic-version, anthropic-beta", "no list\x80", ""])
def test_an_allowed_page_may_delete_a_response_and_send_an_anthropic_clients_headers(wanted: str) -> None:
    headers = {"origin": PAGE, "access_control_request_method": "DELETE"}
    with house(settings=SETTINGS) as here:
        answer = here.request("OPTIONS", PATH, **headers, access_control_request_headers=wanted)
        kept = here.request("DELETE", PATH, origin=PAGE)
    assert answer.status == 204
    assert "DELETE" in answer.headers["access-control-allow-methods"].split(", ")
    assert {"anthropic-version", "anthropic-beta"} <= {*answer.headers["access-control-allow-headers"].split(", ")}
    assert kept.headers["access-control-allow-origin"] == PAGE
