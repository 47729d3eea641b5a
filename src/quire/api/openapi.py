"""The description at `/openapi.json`, in OpenAPI 3.1: routes in the words of their endpoints, and bodies from the same
shapes that read them. Knows no framework: what is routed is handed in.
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
    "400": "Something breaks a rule; the message says which.",
    "401": "A key is needed.",
    "404": "There is no such model.",
    "413": "The body is too large.",
    "429": "The key is over its quota; Retry-After says for how long.",
    "503": "Not now; Retry-After says when.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    """Its parameters stand in braces."""
    endpoint_name: str
    words: str
    """What the endpoint says of itself."""
    is_public: bool
    is_admin: bool
    """For admin keys alone."""
    body: type[BaseModel] | None

    @property
    def operation_id(self) -> str:
        """Programs that were made from the description call it by this: it has to stay what it is."""
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
    told: dict[str, Any] = {
        "summary": one.words.partition(". ")[0].rstrip("."),
        "description": one.words,
        "operationId": one.operation_id,
        "responses": {"200": {"description": "Successful Response"}, **_refusals(one)},
    }
    if names := PARAMETER.findall(one.path):
        told["parameters"] = [_path_parameter(name) for name in names]
    if one.body is not None:
        told["requestBody"] = {"required": True, "content": _json_of(one.body.__name__)}
    if not one.is_public:
        told["security"] = [{"key": []}]
    return told


def _refusals(one: Operation) -> dict[str, Any]:
    if one.is_public:
        return {"503": {"description": "Not now."}}
    statuses = STATUSES | ({"403": "An admin key is needed."} if one.is_admin else {})
    return {status: {"description": said, "content": _json_of("Error")} for status, said in statuses.items()}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "title": name.capitalize()}}


def _json_of(model: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF.format(model=model)}}}
