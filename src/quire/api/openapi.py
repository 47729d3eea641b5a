"""Generate `/openapi.json` (OpenAPI 3.1) from the routes, the docstrings of their endpoints, and the schemas of their
bodies.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from quire import __version__
from quire.api.access.auth import Guard, GuardedRoute, public, require_admin
from quire.api.dialects.openai.error_body import ERROR_SCHEMA

REF = "#/components/schemas/{model}"
PARAMETER = re.compile(r"{(\w+)}")
STATUSES = {
    "400": "The request is invalid; the message names the rule.",
    "401": "An API key is required.",
    "404": "No such model.",
    "413": "The body is too large.",
    "429": "The key is over its quota; Retry-After gives the time to wait.",
    "503": "Not available now; Retry-After gives the time to wait.",
}


def description(routes: Iterable[GuardedRoute], bodies: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes, without HEAD, which is GET without a body."""
    paths: dict[str, Any] = {}
    parts: dict[str, Any] = {"Error": ERROR_SCHEMA}
    for route in routes:
        body = bodies.get(route.path)
        for method in route.methods or () if route.include_in_schema else ():
            paths.setdefault(route.path_format, {})[method.lower()] = _described(route, method.lower(), body)
        if body is not None:
            shape = body.model_json_schema(ref_template=REF)
            parts |= shape.pop("$defs", {})
            parts[body.__name__] = shape
    return {
        "openapi": "3.1.0",
        "info": {"title": "quire", "version": __version__},
        "paths": paths,
        "components": {"schemas": parts, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _described(route: GuardedRoute, method: str, body: type[BaseModel] | None) -> dict[str, Any]:
    docstring = inspect.getdoc(route.endpoint) or ""
    fields: dict[str, Any] = {
        "summary": docstring.partition(". ")[0].rstrip("."),
        "description": docstring,
        # Generated clients use it as a function name, so it must not change.
        "operationId": re.sub(r"\W", "_", route.endpoint.__name__ + route.path_format) + f"_{method}",
        "responses": {"200": {"description": "Successful Response"}, **_refusals(route.guard)},
    }
    if names := PARAMETER.findall(route.path_format):
        fields["parameters"] = [_path_parameter(name) for name in names]
    if body is not None:
        fields["requestBody"] = {"required": True, "content": _json_of(body.__name__)}
    if route.guard is not public:
        fields["security"] = [{"key": []}]
    return fields


def _refusals(guard: Guard) -> dict[str, Any]:
    if guard is public:
        return {"503": {"description": "Not available now."}}
    statuses = STATUSES | ({"403": "An admin key is required."} if guard is require_admin else {})
    return {status: {"description": text, "content": _json_of("Error")} for status, text in statuses.items()}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "title": name.capitalize()}}


def _json_of(model: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF.format(model=model)}}}
