"""A full disk: an answer that could not be kept says so, and a store makes room before it gives up."""

import logging
import sqlite3
from pathlib import Path
from random import Random
from string import ascii_letters

import pytest

from quire.api.access.admission import AdmissionSettings
from quire.api.access.conversation_store import ConversationStore, KeptConversation
from tests.api.dialects.test_tools import tool_talker
from tests.support.servers.local_api import house

BODY = {"model": "oracle", "input": "hello", "max_output_tokens": 4}


def noise(at: int) -> KeptConversation:
    """What no packing makes small."""
    return KeptConversation([{"role": "user", "content": "".join(Random(at).choices(ascii_letters, k=8000))}])


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_that_cannot_be_kept_says_store_false_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_streamed: bool
) -> None:
    """Failed: every answer had store true and an id that was never found; a traceback for each in the log."""
    store = ConversationStore(tmp_path / "kept.db", 1 << 20)
    store.database.execute("PRAGMA query_only = ON")  # nothing can be written: neither kept nor dropped
    with (
        caplog.at_level(logging.ERROR),
        house(models={"oracle": tool_talker()}, settings=AdmissionSettings(store=store)) as here,
    ):
        for _ in range(3):
            reply = here.post("/v1/responses", {**BODY, "stream": is_streamed})
            assert reply.status == 200
            last = reply.data.decode().rpartition('"type":"response')[2] if is_streamed else reply.data.decode()
            assert '"store":false' in last.replace(" ", "")
    store.close()
    told = [one for one in caplog.records if "cannot store" in one.getMessage()]
    assert len(told) == 1
    assert told[0].exc_info is None


def test_on_a_full_disk_the_largest_tenants_oldest_makes_room(tmp_path: Path) -> None:
    """Failed: sqlite3.OperationalError, database or disk is full."""
    store = ConversationStore(tmp_path / "kept.db", 1 << 20)
    for at in range(8):
        store.keep("large", f"l{at}", noise(at))
    store.keep("small", "s", noise(99))
    store.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (pages,) = store.database.execute("PRAGMA page_count").fetchone()
    store.database.execute(f"PRAGMA max_page_count = {pages}")
    before = store.num_bytes
    for at in range(20, 24):
        store.keep("small", f"s{at}", noise(at))
        assert store.find("small", f"s{at}") == noise(at)
    assert store.find("small", "s") is not None
    assert store.find("large", "l0") is None
    assert store.num_bytes <= before + 100
    rows = store.database.execute("SELECT SUM(LENGTH(conversation) + 200) FROM conversations").fetchone()
    assert store.num_bytes == rows[0]
    store.close()


def test_an_id_that_was_kept_before_is_a_mistake_and_no_full_disk(tmp_path: Path) -> None:
    store = ConversationStore(tmp_path / "kept.db", 1 << 20)
    store.keep("alice", "a", noise(1))
    with pytest.raises(sqlite3.IntegrityError):
        store.keep("alice", "a", noise(2))
    store.close()
