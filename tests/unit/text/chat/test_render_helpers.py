"""A template runs where it can be stopped: what takes long or much ends alone, and the next chat is answered."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import pytest

from quire.errors import CapacityError, CheckpointError, EngineDeadError, InvalidTextError, TemplateError
from quire.text.chat.rendering.template import IDLE_HELPERS, MAX_HELPERS, RENDER_S, ChatTemplate
from quire.text.sandboxed.helper import encode_frame
from quire.text.sandboxed.messages import (
    LoadTemplate,
    Render,
    Rendered,
    TemplateLoaded,
    ToServer,
    read_to_server,
)
from quire.text.sandboxed.pool import Helper, HelperPool, StoppedError
from tests.support.errors import raises_code
from tests.support.machine.sandboxed import free_helpers, pool_of

SQUARING = "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"
BURNING = "{% if messages[0].content == 'burn' %}" + SQUARING + "{% endif %}{{ messages[0].content }}"
HUGE = "{% if messages[0].content == 'fill' %}{{ ('a' * 1000000).replace('a', 'b' * 1000) }}{% endif %}ok"


def said(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def helpers(source: str = BURNING) -> HelperPool[ToServer]:
    load = encode_frame(LoadTemplate(source, {}, 1000, 1000))
    return HelperPool(IDLE_HELPERS, lambda: load, read_to_server, RENDER_S, MAX_HELPERS)


def rendered(ours: HelperPool[ToServer], content: str) -> ToServer:
    frame = encode_frame(Render(said(content), None, None, {}, True, "2026-01-01T00:00:00"))
    with ours.reserve():
        return ours.request(frame, RENDER_S)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]


def wait_until_gone(pid: int) -> None:
    deadline_s = monotonic() + 60
    while not is_gone(pid):
        assert monotonic() < deadline_s, f"process {pid} is still there"
        sleep(0.01)


def wait_until_busy(ours: HelperPool[ToServer]) -> None:
    deadline_s = monotonic() + 60
    while not ours._busy:
        assert monotonic() < deadline_s
        sleep(0.001)


def test_a_rendering_that_takes_too_long_is_stopped_and_the_next_is_answered() -> None:
    template = ChatTemplate(BURNING, {})
    with raises_code(TemplateError, "rendering_stopped"):
        template.render(said("burn"))
    assert template.render(said("hello")).text == "hello"
    template.close()


def test_a_rendering_that_needs_too_much_memory_is_refused_and_the_next_is_answered() -> None:
    template = ChatTemplate(HUGE, {})
    with raises_code(TemplateError, "memory_exceeded"):
        template.render(said("fill"))
    assert template.render(said("hello")).text == "ok"
    template.close()


def test_a_template_that_must_be_stopped_when_it_is_loaded_refuses_chats_only() -> None:
    template = ChatTemplate(
        "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}", {}
    )
    for _ in range(2):
        with raises_code(TemplateError, "loading_stopped"):
            template.render(said("hello"))


def test_a_process_that_dies_between_two_chats_is_replaced_before_the_next() -> None:
    ours = helpers()
    ours.load()
    [first] = free_helpers(ours)
    os.kill(first.pid, signal.SIGKILL)
    wait_until_gone(first.pid)
    answer = rendered(ours, "hello")
    assert isinstance(answer, Rendered)
    assert answer.text == "hello"
    ours.close()


def test_a_process_that_dies_in_the_middle_costs_its_chat_and_is_replaced() -> None:
    ours = helpers()
    ours.load()
    [first] = free_helpers(ours)

    def kill() -> None:
        wait_until_busy(ours)
        os.kill(first.pid, signal.SIGKILL)

    killer = Thread(target=kill)
    killer.start()
    with pytest.raises(StoppedError, match="ended unexpectedly"):
        rendered(ours, "burn")
    killer.join(60)
    assert isinstance(rendered(ours, "hello"), Rendered)
    ours.close()


def test_many_threads_share_two_processes() -> None:
    ours = helpers()
    ours.load()
    with ThreadPoolExecutor(8) as threads:
        answers = [*threads.map(lambda index: rendered(ours, f"chat {index}"), range(200))]
    assert [one.text for one in answers if isinstance(one, Rendered)] == [f"chat {index}" for index in range(200)]
    assert len(free_helpers(ours)) <= MAX_HELPERS
    ours.close()


def test_closing_ends_what_is_being_rendered_and_what_waits() -> None:
    ours = helpers()
    ours.load()
    errors: list[BaseException] = []
    is_started = Event()

    def burn() -> None:
        is_started.set()
        try:
            rendered(ours, "burn")
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=burn) for _ in range(4)]
    for thread in threads:
        thread.start()
    is_started.wait(20)
    ours.close()
    for thread in threads:
        thread.join(60)
    assert [type(error) for error in errors] == 4 * [EngineDeadError]
    with raises_code(EngineDeadError, "engine_dead"):
        rendered(ours, "hello")


def test_a_process_waits_for_the_next_model_and_knows_nothing_of_the_last() -> None:
    IDLE_HELPERS.kill_all()
    ours = helpers("{{ 1 }}")
    ours.load()
    [first] = free_helpers(ours)
    ours.close()
    others = helpers("{{ 2 }}")
    assert isinstance(others.load(), TemplateLoaded)
    [second] = free_helpers(others)
    assert second.pid == first.pid
    answer = rendered(others, "x")
    assert isinstance(answer, Rendered)
    assert answer.text == "2"
    others.close()


def test_few_processes_wait_and_none_that_has_died() -> None:
    IDLE_HELPERS.kill_all()
    many = [Helper(IDLE_HELPERS.command) for _ in range(MAX_HELPERS + 1)]
    for one in many:
        IDLE_HELPERS.give_back(one)
    assert sum(one.is_alive for one in many) == MAX_HELPERS
    for one in many[:MAX_HELPERS]:
        os.kill(one.pid, signal.SIGKILL)
        wait_until_gone(one.pid)
    fresh = IDLE_HELPERS.take()
    assert fresh.is_alive
    assert fresh not in many
    fresh.kill()


def test_processes_end_when_nobody_has_the_template_any_more_or_its_server_dies() -> None:
    code = (
        "import os, signal\nfrom quire.text.chat.rendering.template import ChatTemplate\n"
        "template = ChatTemplate('x', {})\nprint(template._helpers._free[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    wait_until_gone(int(run.stdout))
    template = ChatTemplate("x", {})
    ours = pool_of(template)
    del template
    with pytest.raises(EngineDeadError):
        rendered(ours, "x")


def test_a_process_that_cannot_be_started_is_the_servers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    IDLE_HELPERS.kill_all()
    monkeypatch.setattr(IDLE_HELPERS, "command", ("/nonexistent/python",))
    with raises_code(CapacityError, "process_not_started"):
        helpers().load()
    monkeypatch.setattr(IDLE_HELPERS, "command", (sys.executable, "-c", ""))
    with raises_code(CapacityError, "process_not_started"):
        helpers().load()


def test_it_is_told_nothing_of_our_environment_that_it_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_SECRET", "x")
    helper = Helper(IDLE_HELPERS.command)
    environment = Path(f"/proc/{helper.pid}/environ").read_bytes()
    helper.kill()
    assert b"QUIRE_SECRET" not in environment


def test_what_json_cannot_say_is_refused_before_it_is_sent() -> None:
    template = ChatTemplate("x", {})
    for strange in (object(), "\ud800"):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": strange}}}
        messages: list[dict[str, Any]] = [*said("x"), {"role": "assistant", "content": "", "tool_calls": [call]}]
        with raises_code(InvalidTextError, "not_json"):
            template.render(messages)
    template.close()


def test_half_characters_are_refused() -> None:
    with raises_code(CheckpointError, "invalid_checkpoint"):
        ChatTemplate("{{ '\\ud800' }}", {}).render(said("x"))


def test_escapes_for_browsers_are_refused() -> None:
    with raises_code(CheckpointError, "template_not_compiled"):
        ChatTemplate("{% autoescape true %}{{ 1 }}{% endautoescape %}", {}).render(said("x"))
