"""`/openapi.json`: everything that is routed is described, and nothing that is not."""

import re
from typing import Any

import pytest
from starlette.routing import Route

from quire.api.access.auth import Gate
from quire.api.access.keys import KeyRing
from quire.api.app import BODY_ROUTES, make_app
from quire.api.models.registry import Models
from quire.api.server_state import ServerState
from quire.api.web_page import PAGES
from quire.observe.metrics import Metrics
from tests.support.servers.local_api import LiveServer

PUBLIC = {"/health", "/ready"}
Operations = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture
def told(here: LiveServer) -> Operations:
    """Every operation by its path and its method."""
    paths = here.get("/openapi.json").json["paths"]
    return {(path, method): one for path, methods in paths.items() for method, one in methods.items()}


def test_it_has_every_route_but_those_that_are_for_probes_alone(told: Operations) -> None:
    app = make_app(ServerState(Models([]), Metrics()), Gate(KeyRing(None)))
    routes = [route for route in app.routes if isinstance(route, Route)]
    routed = {(route.path_format, method.lower()) for route in routes for method in route.methods or ()}
    page = {(path, method) for one in PAGES for path in one.contents for method in ("get", "head")}
    assert {("/health", "head"), ("/ready", "head"), ("/v1/admin/session", "post"), *page} == routed - set(told)
    assert set(told) <= routed
    assert len(told) >= 18


def test_every_operation_has_words_and_a_name_of_its_own(told: Operations) -> None:
    assert len({one["operationId"] for one in told.values()}) == len(told)
    assert all(one["summary"] and one["description"].startswith(one["summary"]) for one in told.values())
    explain = told["/v1/cache/explain", "post"]
    assert explain["description"] == explain["summary"] + ". Nothing is computed."


def test_names_that_programs_were_made_with_stay(told: Operations) -> None:
    assert told["/v1/chat/completions", "post"]["operationId"] == "_chat_v1_chat_completions_post"
    assert told["/v1/models/{name}", "get"]["operationId"] == "_model_v1_models__name__get"


def test_every_route_but_the_public_ones_asks_for_a_key_and_says_how_it_refuses(told: Operations) -> None:
    for (path, _), one in told.items():
        refusals = {"503"} if path in PUBLIC else {"400", "401", "404", "413", "429", "503"}
        refusals |= {"403"} if path.startswith("/v1/admin/") else set()
        assert set(one["responses"]) == {"200"} | refusals
        assert one.get("security", []) == ([] if path in PUBLIC else [{"key": []}])


def test_what_is_posted_has_the_shape_that_reads_it(told: Operations, here: LiveServer) -> None:
    schemas = here.get("/openapi.json").json["components"]["schemas"]
    posted = {path: one["requestBody"] for (path, method), one in told.items() if method == "post"}
    assert set(posted) == set(BODY_ROUTES)
    for path, body in posted.items():
        schema = BODY_ROUTES[path][-1]
        name = schema.__name__
        assert body["required"]
        assert body["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{name}"}
        shape = schema.model_json_schema(ref_template="#/components/schemas/{model}")
        parts = shape.pop("$defs", {})
        assert schemas[name] == shape
        assert {part: schemas[part] for part in parts} == parts
    assert not any("requestBody" in one for (_, method), one in told.items() if method != "post")


def test_what_stands_in_a_path_is_a_parameter(told: Operations) -> None:
    for (path, _), one in told.items():
        assert [given["name"] for given in one.get("parameters", ())] == re.findall(r"{(\w+)}", path)
    (name,) = told["/v1/models/{name}", "get"]["parameters"]
    assert (name["in"], name["required"], name["schema"]["type"]) == ("path", True, "string")
