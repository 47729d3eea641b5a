"""Engines that talk without a model: the oracle behind a small tokenizer, so that counts are exact and steps cheap."""

from threading import Event, Semaphore

from quire.backends.oracle import OracleRunner
from quire.backends.protocol import Capacity
from quire.client.engines.opening import OpenedModel
from quire.client.request.text_model import TextModel
from quire.core.scheduling.scheduler_config import SchedulerConfig
from quire.core.step import NO_MASKS, Masks, StepPlan, StepResult
from quire.engine.engine import Engine, ModelIdentity, ModelInfo
from quire.engine.guides import GrammarMatchers
from quire.text.chat.rendering.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from tests.support.core.grammars import small_vocabulary
from tests.support.models.small_tokenizers import byte_level

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
AGENT_TEMPLATE = (
    "{% if tools %}{% for t in tools %}<tool>{{ t | tojson }}</tool>{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<s>{{ m.reasoning_content }}</s>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls %}{{ '\\n' }}<tool_call>{{ '\\n' }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{{ "\\n" }}</tool_call>'
    "{% endfor %}</end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Of a model that calls tools and thinks."""


class FailingRunner(OracleRunner):
    """An oracle whose steps fail from a given one on."""

    def __init__(self, capacity: Capacity, fails_at: int) -> None:
        super().__init__(capacity)
        self._fails_at = fails_at

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        if plan.step >= self._fails_at:
            raise RuntimeError("the device is gone")
        return super().run(plan, masks)


class PacedRunner(OracleRunner):
    """An oracle that makes one step for each permit it is given, until it is let go."""

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self.permits = Semaphore(0)
        self.is_waiting = Event()
        """A step has been started and waits."""
        self._is_free = False

    def allow(self, num_steps: int) -> None:
        """So many more steps."""
        if num_steps:
            self.is_waiting.clear()
            self.permits.release(num_steps)

    def let_go(self) -> None:
        """From now on without asking."""
        self._is_free = True
        self.permits.release()

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        if not self._is_free and not self.permits.acquire(blocking=False):
            self.is_waiting.set()
            self.permits.acquire()
        return super().run(plan, masks)


def paced_talker(**settings: int) -> tuple[OpenedModel, PacedRunner]:
    """A talker that waits for permission, and the runner that is given it."""
    opened = talker(**settings)  # type: ignore[arg-type]  # numbers all, and no template
    runner = PacedRunner(opened.engine.runner.capacity)
    opened.engine.runner = runner
    return opened, runner


def talker(
    num_blocks: int = 256,
    block_size: int = 4,
    *,
    fails_at: int | None = None,
    template: str = TEMPLATE,
    max_bytes: int = 4_000,
    num_slots: int = 0,
    **settings: int,
) -> OpenedModel:
    """A model whose answers are noise, the same for the same question; with slots it keeps a state, too."""
    config = SchedulerConfig(**{"max_step_tokens": 64, "max_running": 16, "max_sequence_tokens": 512, **settings})  # type: ignore[arg-type]
    longest = config.max_sequence_tokens
    tokenizer = Tokenizer(byte_level().library, max_bytes=max_bytes, max_tokens=longest)
    size = tokenizer.vocabulary_size
    capacity = Capacity(num_blocks, block_size, longest, config.max_step_tokens, size, 8 * block_size, num_slots)
    runner = OracleRunner(capacity) if fails_at is None else FailingRunner(capacity, fails_at)
    engine = Engine(
        runner, config, ModelIdentity("oracle", "slots"), bytes(32), guides=GrammarMatchers(small_vocabulary)
    )
    text = TextModel("oracle", engine.info, tokenizer, ChatTemplate(template, {}), frozenset({size - 1}), {})
    return OpenedModel(engine, text)


def model_info(vocabulary_size: int, max_sequence_tokens: int) -> ModelInfo:
    """Of a model that nobody has loaded."""
    return ModelInfo(ModelIdentity("oracle", "slots"), 4, 64, vocabulary_size, max_sequence_tokens, "an oracle")
