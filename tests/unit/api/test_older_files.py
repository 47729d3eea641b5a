"""Files that 0.2.0 wrote are read: their keys stay when names in the code change."""

import json
import sqlite3
import zlib
from pathlib import Path

from quire.api.access.conversation_store import ConversationStore, KeptConversation
from quire.engine.trace_records import Submitted
from quire.sim.replay.trace_lines import trace_lines


def test_a_conversation_that_0_2_0_stored_is_found_with_its_response(tmp_path: Path) -> None:
    path = tmp_path / "kept.db"
    stored = b'{"messages":[{"role":"user","content":"hi"}],"fields":{"model":"m"},"told":{"id":"resp_1"}}'
    database = sqlite3.connect(path)
    database.execute(
        "CREATE TABLE conversations (number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL,"
        " answer_id TEXT NOT NULL, conversation BLOB NOT NULL, UNIQUE (tenant, answer_id))"
    )
    row = ("a", "resp_1", zlib.compress(stored))
    database.execute("INSERT INTO conversations (tenant, answer_id, conversation) VALUES (?, ?, ?)", row)
    database.commit()
    database.close()
    path.chmod(0o600)
    store = ConversationStore(path, 1 << 20)
    expected = KeptConversation([{"role": "user", "content": "hi"}], {"model": "m"}, {"id": "resp_1"})
    assert store.find("a", "resp_1") == expected
    store.close()


def test_a_trace_that_0_2_0_wrote_has_its_reservation(tmp_path: Path) -> None:
    header = {
        "is": "header", "quire_trace": 1, "quire": "0.2.0", "model": "m", "started_unix_s": 1.0, "vocabulary_size": 9,
        "has_own_tokens": True, "has_grammars": False, "guesses": False, "memory": {"num_blocks": 16}, "scheduler": {},
    }  # fmt: skip
    namespace = {
        "format_version": 1, "model": "m", "adapter": "", "kv_layout": "k", "block_size": 32, "cache_group": "",
    }  # fmt: skip
    submit = {
        "is": "submit", "request_id": "r", "prompt": [1, 2], "namespace": namespace, "arrival_s": 0.0,
        "sampling": {"max_tokens": 4}, "tenant": "a", "priority": "normal", "continuations": [{}], "is_promised": True,
    }  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(header)}\n{json.dumps(submit)}\n")
    _, line = trace_lines(path)
    assert isinstance(line.record, Submitted)
    assert (line.record.request_id, line.record.has_reservation) == ("r", True)
