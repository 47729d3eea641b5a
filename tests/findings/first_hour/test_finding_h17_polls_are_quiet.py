"""Polls and the files of pages leave no line in the log; what was asked of a model, and what was refused, does."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from quire.api.web_page import PAGES
from quire.observe import access_log
from tests.support.servers.local_api import house

POLLS = ("/ready", "/health", "/metrics")


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """The log, and everything as it was afterwards."""
    root = logging.getLogger()
    before, level, out = root.handlers[:], root.level, io.StringIO()
    access_log.configure_logging("json", stream=out)
    yield out
    root.handlers[:] = before
    root.setLevel(level)


def test_polls_and_static_files_are_not_in_the_log(written: io.StringIO) -> None:
    with house() as here:
        for path in (*POLLS, *(files.path_of(name) for files in PAGES for name in files.names)):
            assert here.get(path).status == 200, path
        here.get("/v1/models")
        here.get("/nothing.js")
        here.wait_until_free()
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [line["path"] for line in lines if line["from"] == "quire.access"] == ["/v1/models", "/nothing.js"]
