"""Building blocks of all dialects' body schemas, and the error for a body that does not match its schema."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quire.api.dialects.breakpoints import Breakpoint
from quire.api.http.errors import ApiError, invalid

# fail_fast: a list with a million invalid items must produce one error, not a million.
Ints = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
IntLists = Annotated[list[Ints], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class Schema(BaseModel):
    """Base of the schemas: known fields are validated; unknown names were already handled by `field_names`."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


Service = tuple[str | None, int | None, str | None]
"""Service tier, numeric priority (lower is more urgent) and cache salt (narrows the tenant's cache group)."""


class GenerationFields(Schema):
    """Fields that the bodies of all dialects' generation endpoints have."""

    model: str | None = Field(None, description="One of the names in /v1/models.")
    stream: bool | None = None
    return_progress: bool | None = Field(None, description="Report prompt_progress while a stream waits.")
    stop_loops: bool | None = Field(None, description="End an answer that repeats itself; default: --stop-loops.")

    @property
    def service(self) -> Service:
        """The request's priority, and which requests may share its cached blocks."""
        return None, None, None

    @property
    def compared_id(self) -> str | None:
        """The id of an earlier response, with whose prompt this one is compared; None: not requested."""
        return None

    @property
    def breakpoints(self) -> list[Breakpoint]:
        """The places up to which the prompt is to be kept for a time. Raises ApiError for an invalid time."""
        return []

    @property
    def effort(self) -> str:
        """The requested reasoning effort, if the API reports a change of it as the cause of a cache miss."""
        return ""


def validated(schema: type[Any], body: dict[str, Any]) -> Any:
    """Return the fields of a body. Raises ApiError for the first invalid one."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise _first_error(error) from None


def _first_error(error: ValidationError) -> ApiError:
    details = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # After the field's name, `loc` has names of union branches, which mean nothing to a client.
    name = str(details["loc"][0]) if details["loc"] else "body"
    code = "missing_parameter" if details["type"] == "missing" else "invalid_parameter"
    path = ".".join(str(part) for part in details["loc"]) or name
    return invalid(f"{path[:100]}: {details['msg']}", name, code)
