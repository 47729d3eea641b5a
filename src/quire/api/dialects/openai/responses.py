"""`/v1/responses`: items in, items out. A conversation is sent whole every time; none is kept."""

from typing import Any

from quire.api.access.auth import Caller
from quire.api.dialects.dialect import GenerationRequest, Target
from quire.api.dialects.images import Images
from quire.api.dialects.openai.fields import TIERS
from quire.api.dialects.openai.response_items import messages_of_items, response_grammar, response_tools
from quire.api.dialects.openai.response_writer import ItemsWriter
from quire.api.dialects.openai.schemas import ResponseFields, parse_fields
from quire.api.dialects.request_options import asked_class, request_options
from quire.api.http.errors import unsupported
from quire.api.http.headers import Headers
from quire.api.models import Models
from quire.client.conversation import converse
from quire.client.params import SamplingParams
from quire.client.text_model import TemplateArguments
from quire.core.request import PriorityClass
from quire.errors import RequestTooLargeError

KEPT = ("previous_response_id", "conversation", "prompt")
"""What would be read from a store."""


class Responses:
    """Makes questions out of bodies."""

    def __init__(self, images: Images) -> None:
        self._images = images

    def parse(self, body: dict[str, Any]) -> ResponseFields:
        """Valid fields, or a refusal."""
        fields: ResponseFields = parse_fields(ResponseFields, {**body, "prompt": None})
        for name in KEPT:
            if body.get(name):
                raise unsupported(name, "this server keeps no responses; send all of the conversation as input")
        if body.get("background"):
            raise unsupported("background", "an answer is sent to whoever waits for it")
        return fields

    def target(self, fields: ResponseFields, models: Models, caller: Caller, headers: Headers) -> Target:
        """Whom it asks, and in whose name."""
        wanted = asked_class(headers, None, TIERS.get(fields.service_tier or "", PriorityClass.NORMAL))
        return Target(models.named(fields.model), request_options(caller, wanted))

    def generation(self, fields: ResponseFields, to: Target) -> GenerationRequest:
        """What it asks, in tokens. An answer is as long as there is room."""
        arguments: TemplateArguments = {}
        effort = (fields.reasoning or {}).get("effort")
        if isinstance(effort, str):
            arguments["extra"] = {"reasoning_effort": effort}
        messages = messages_of_items(fields, self._images)
        asked = converse(to.text, messages, response_tools(fields), response_grammar(fields), **arguments)
        room = to.text.max_sequence_tokens - len(asked.ids)
        if room < 1:
            raise RequestTooLargeError(f"{len(asked.ids)} tokens in the input were given; shorten it")
        given = {"temperature": fields.temperature, "top_p": fields.top_p}
        limit = fields.max_output_tokens
        params = SamplingParams(
            max_tokens=room if limit is None else min(limit, room),
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )
        params = asked.applied(params)
        return GenerationRequest(to, [asked.ids], params, ItemsWriter(to.model.name, fields), bool(fields.stream))
