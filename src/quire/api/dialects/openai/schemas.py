"""Body schemas of the OpenAI API. Known fields are typed; unknown names were already handled by `field_names`.

The schemas only check types; the engine checks numeric ranges.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.api.dialects.body_shapes import GenerationFields, IntLists, Ints, Objects, Schema, Service, Texts, validated
from quire.api.dialects.breakpoints import Breakpoint, block_breakpoints, keep_seconds, part_kind
from quire.api.http.errors import invalid
from quire.api.http.limits import MAX_MESSAGES, MAX_PROMPTS
from quire.client.request.params import MAX_BIASES


class StreamOptionsFields(Schema):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(GenerationFields):
    """Fields that chat and completions have in common."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream_options: StreamOptionsFields | None = None
    stop: str | Texts | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    service_tier: str | None = None
    user: Any = None
    """Accepted in any shape, and ignored."""
    # Extensions of other servers.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Ints | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: Ints | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = Field(None, description="text, json_object, or json_schema with a schema.")
    structured_outputs: dict[str, Any] | None = Field(None, description="json, json_object, regex, choice or grammar.")
    guided_json: dict[str, Any] | str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = Field(None, description="Lark, or GBNF, recognized by ::= in it.")
    cache_explain: bool | None = Field(None, description="Report in usage why the next token was not in the cache.")

    @property
    def service(self) -> Service:
        return self.service_tier, self.priority, self.cache_salt


class ContentPart(Schema):
    """One part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(Schema):
    """One message of a conversation."""

    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None


ChatMessages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class TemplateFields(Schema):
    """Arguments of a chat template."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatFields(SamplingFields, TemplateFields):
    """`POST /v1/chat/completions`."""

    messages: ChatMessages
    max_completion_tokens: int | None = None
    tools: Objects | None = Field(None, description="Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = Field(None, description="auto, none, required, or a function's name.")
    parallel_tool_calls: bool | None = None
    thinking_token_budget: int | None = Field(None, description="Maximum tokens of reasoning, which then is ended.")
    logprobs: bool | None = None
    top_logprobs: int | None = None


PromptField = str | list[int]


class CompletionFields(SamplingFields):
    """`POST /v1/completions`."""

    prompt: str | Ints | Texts | IntLists
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[PromptField]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)  # type: ignore[arg-type]


BREAKPOINT = "prompt_cache_breakpoint"


class CacheOptionsFields(Schema):
    """`prompt_cache_options`."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    comparison_response_id: str | None = Field(None, description="Report why this response's prompt was not reused.")
    prewarm: bool | None = None


class ResponseFields(GenerationFields):
    """`POST /v1/responses`."""

    input: str | Objects
    instructions: str | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = Field(None, description="format: text, json_object, or json_schema with a schema.")
    reasoning: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    service_tier: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = Field(None, description="false: the response cannot be continued by its id.")
    previous_response_id: str | None = Field(None, description="The response that this one continues.")
    prompt_cache_key: str | None = Field(None, description="Returned, and not part of the cache's names.")
    prompt_cache_retention: str | None = None
    prompt_cache_options: CacheOptionsFields | None = None

    @property
    def breakpoints(self) -> list[Breakpoint]:
        items = self.input if isinstance(self.input, list) else []
        ttl = None if self.prompt_cache_options is None else self.prompt_cache_options.ttl
        marks = list[Breakpoint]()
        for index, item in enumerate(items):
            kind_and_index = part_kind(item.get("role"), index, items)
            marks += block_breakpoints(item.get("content", item.get("output")), BREAKPOINT, ttl, *kind_and_index)
        if ttl is not None and self.prompt_cache_options is not None and self.prompt_cache_options.mode != "explicit":
            marks.append(Breakpoint(keep_seconds(ttl, "prompt_cache_options")))
        return marks

    @property
    def compared_id(self) -> str | None:
        return None if self.prompt_cache_options is None else self.prompt_cache_options.comparison_response_id

    @property
    def effort(self) -> str:
        return str((self.reasoning or {}).get("effort") or "")

    @property
    def service(self) -> Service:
        return self.service_tier, None, None


class TokenizeFields(TemplateFields):
    """`POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: ChatMessages | None = None
    tools: Objects | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(Schema):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Ints


def parse_fields(schema: type[Any], body: dict[str, Any]) -> Any:
    """Return the fields of a body. Raises ApiError for the first invalid one."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and not all(type(one) is int for one in prompt):
        raise invalid(f"expected at most {MAX_PROMPTS} prompts, got {len(prompt)}; send several requests", "prompt")
    biases = body.get("logit_bias")
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise invalid(f"expected at most {MAX_BIASES} tokens in logit_bias, got {len(biases)}", "logit_bias")
    return validated(schema, body)
