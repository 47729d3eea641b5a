"""What an error or a warning advises can be done, and names the limit that holds."""

from dataclasses import replace

import pytest

from quire.cli.agents.agent_clients import Server
from quire.cli.agents.launch import _warn_of_length
from quire.errors import TemplateError
from tests.support.errors import raises_code
from tests.support.servers.talkers import talker


def test_a_model_without_a_template_is_not_sent_to_an_option_that_is_not_there() -> None:
    with raises_code(TemplateError, "template_missing") as refused:
        replace(talker().text, template=None).chat([{"role": "user", "content": "hello"}])
    advice = str(refused.value)
    assert "completions endpoint" in advice
    assert "template file" not in advice


def test_a_short_model_is_not_blamed_on_memory_alone(capsys: pytest.CaptureFixture[str]) -> None:
    _warn_of_length(Server("http://127.0.0.1:1", "m", "none", 8192))
    said = capsys.readouterr().err
    assert "8,192 tokens" in said
    assert "use a model with a longer context" in said
