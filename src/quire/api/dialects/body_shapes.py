"""What the schemas of all dialects' bodies are made of, and the error for a body that does not match."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quire.api.http.errors import ApiError, invalid

# A list of a million mistakes must not become a million errors: the first is enough.
Ints = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Lists = Annotated[list[Ints], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class Loose(BaseModel):
    """Known fields are checked; unknown ones were checked before."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


def validated(shape: type[Any], body: dict[str, Any]) -> Any:
    """The fields of a body. Raises ApiError for the first invalid one."""
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        raise _first(error) from None


def _first(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Branches of a union follow the field's name; they mean nothing to a client.
    name = str(found["loc"][0]) if found["loc"] else "body"
    kind = "missing_parameter" if found["type"] == "missing" else "invalid_parameter"
    where = ".".join(str(part) for part in found["loc"]) or name
    return invalid(f"{where[:100]}: {found['msg']}", name, kind)
