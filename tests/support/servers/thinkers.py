"""A talker that thinks: its prompts end inside a thought."""

from quire.client.engines.opening import OpenedModel
from quire.client.request.text_model import TextModel
from quire.text.chat.rendering.template import ChatTemplate
from tests.support.servers.talkers import talker

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<s>{{ m.reasoning_content }}</s>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><s>{% endif %}"
)


def thinker() -> OpenedModel:
    """A talker whose prompts end inside a thought."""
    opened = talker(num_blocks=512, max_sequence_tokens=1536)
    plain = opened.text
    text = TextModel("oracle", opened.engine.info, plain.tokenizer, ChatTemplate(TEMPLATE, {}), plain.eos_token_ids, {})
    return OpenedModel(opened.engine, text)
