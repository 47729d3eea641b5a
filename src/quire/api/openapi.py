"""The description at `/openapi.json`, in OpenAPI 3.1: routes with the docstrings of their endpoints, and bodies from
the schemas that parse them. Independent of the framework: the operations are passed in.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from quire import __version__
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


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    """Its parameters stand in braces."""
    endpoint_name: str
    docstring: str
    is_public: bool
    is_admin: bool
    """For admin keys alone."""
    body: type[BaseModel] | None

    @property
    def operation_id(self) -> str:
        """Generated clients call it by this: it must not change."""
        return re.sub(r"\W", "_", self.endpoint_name + self.path) + f"_{self.method.lower()}"


def description(operations: Iterable[Operation]) -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, Any] = {}
    parts: dict[str, Any] = {"Error": ERROR_SCHEMA}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _described(one)
        if one.body is not None:
            shape = one.body.model_json_schema(ref_template=REF)
            parts |= shape.pop("$defs", {})
            parts[one.body.__name__] = shape
    return {
        "openapi": "3.1.0",
        "info": {"title": "quire", "version": __version__},
        "paths": paths,
        "components": {"schemas": parts, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _described(one: Operation) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "summary": one.docstring.partition(". ")[0].rstrip("."),
        "description": one.docstring,
        "operationId": one.operation_id,
        "responses": {"200": {"description": "Successful Response"}, **_refusals(one)},
    }
    if names := PARAMETER.findall(one.path):
        fields["parameters"] = [_path_parameter(name) for name in names]
    if one.body is not None:
        fields["requestBody"] = {"required": True, "content": _json_of(one.body.__name__)}
    if not one.is_public:
        fields["security"] = [{"key": []}]
    return fields


def _refusals(one: Operation) -> dict[str, Any]:
    if one.is_public:
        return {"503": {"description": "Not available now."}}
    statuses = STATUSES | ({"403": "An admin key is required."} if one.is_admin else {})
    return {status: {"description": text, "content": _json_of("Error")} for status, text in statuses.items()}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "title": name.capitalize()}}


def _json_of(model: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF.format(model=model)}}}
