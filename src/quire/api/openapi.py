"""The description at `/openapi.json`: what bodies look like, from the same shapes that read them."""

from copy import deepcopy
from typing import Any

from pydantic import BaseModel

from quire.api.dialects.openai.error_body import ERROR_SCHEMA

REF = "#/components/schemas/{model}"
STATUSES = {
    "400": "Something breaks a rule; the message says which.",
    "401": "A key is needed.",
    "404": "There is no such model.",
    "413": "The body is too large.",
    "429": "The key is over its quota; Retry-After says for how long.",
    "503": "Not now; Retry-After says when.",
}


def described(method: str, path: str) -> dict[str, Any]:
    """What a route says beside what the framework knows: its errors, and which body it takes."""
    if path in ("/health", "/ready"):
        return {"responses": {"503": {"description": "Not now."}}}
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    told: dict[str, Any] = {
        "responses": {status: {"description": said, **error} for status, said in STATUSES.items()},
        "security": [{"key": []}],
    }
    if method == "POST":
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": {"$ref": path}}}}
    return told


def with_bodies(schema: dict[str, Any], bodies: dict[str, type[BaseModel]]) -> dict[str, Any]:
    """The framework's description with the shapes of bodies put in."""
    whole = deepcopy(schema)
    parts = whole.setdefault("components", {}).setdefault("schemas", {})
    parts["Error"] = ERROR_SCHEMA
    whole["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, shape in bodies.items():
        own = shape.model_json_schema(ref_template=REF)
        parts |= own.pop("$defs", {})
        parts[shape.__name__] = own
        body = whole["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        body["schema"] = {"$ref": REF.format(model=shape.__name__)}
    return whole
