"""Without a network it is said that the hub cannot be reached, and a full disk is not blamed on it."""

import pytest
from typer.testing import CliRunner

from quire.checkpoints.hub.listing import hub_errors
from quire.cli import app
from quire.errors import CheckpointError
from tests.support.errors import raises_code


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://hub.invalid"])
def test_a_hub_that_cannot_be_reached_is_named_as_the_reason(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    with raises_code(CheckpointError, "hub_not_reachable"):
        CliRunner().invoke(app, ["pull", "nosuch/model"], catch_exceptions=False)


def test_a_full_disk_is_not_blamed_on_the_network() -> None:
    with raises_code(CheckpointError, "download_failed"), hub_errors("a/b"):
        raise OSError(28, "No space left on device")
