"""Generate `/openapi.json` (OpenAPI 3.1) from the routes, the docstrings of their endpoints, and their body schemas."""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from quire import __version__
from quire.api.access.auth import Guard, GuardedRoute, public, require_admin
from quire.api.dialects.openai.error_body import ERROR_SCHEMA

SCHEMA_REF = "#/components/schemas/{model}"
PATH_PARAMETER = re.compile(r"{(\w+)}")
ERROR_STATUSES = {
    "400": "The request is invalid; the message says what was expected.",
    "401": "An API key is required.",
    "404": "No such model.",
    "413": "The body is too large.",
    "429": "The key is over its quota; Retry-After gives the time to wait.",
    "503": "Not available now; Retry-After gives the time to wait.",
}


def openapi_document(routes: Iterable[GuardedRoute], bodies: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes, without HEAD, which is GET without a body."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {"Error": ERROR_SCHEMA}
    for route in routes:
        body = bodies.get(route.path)
        for method in route.methods or () if route.include_in_schema else ():
            paths.setdefault(route.path_format, {})[method.lower()] = _operation(route, method.lower(), body)
        if body is not None:
            schema = body.model_json_schema(ref_template=SCHEMA_REF)
            schemas |= schema.pop("$defs", {})
            schemas[body.__name__] = schema
    return {
        "openapi": "3.1.0",
        "info": {"title": "quire", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: GuardedRoute, method: str, body: type[BaseModel] | None) -> dict[str, Any]:
    docstring = inspect.getdoc(route.endpoint) or ""
    fields: dict[str, Any] = {
        "summary": docstring.partition(". ")[0].rstrip("."),
        "description": docstring,
        # Generated clients use the id as a function name, so it must not change.
        "operationId": re.sub(r"\W", "_", route.endpoint.__name__ + route.path_format) + f"_{method}",
        "responses": {"200": {"description": "Successful Response"}, **_error_responses(route.guard)},
    }
    if names := PATH_PARAMETER.findall(route.path_format):
        fields["parameters"] = [_path_parameter(name) for name in names]
    if body is not None:
        fields["requestBody"] = {"required": True, "content": _json_of(body.__name__)}
    if route.guard is not public:
        fields["security"] = [{"key": []}]
    return fields


def _error_responses(guard: Guard) -> dict[str, Any]:
    if guard is public:
        return {"503": {"description": "Not available now."}}
    statuses = ERROR_STATUSES | ({"403": "An admin key is required."} if guard is require_admin else {})
    return {status: {"description": text, "content": _json_of("Error")} for status, text in statuses.items()}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "title": name.capitalize()}}


def _json_of(model: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": SCHEMA_REF.format(model=model)}}}
