"""Conversations that clients go on with by an id: kept in one SQLite file, each for its tenant alone.

A conversation is kept whole under the id of its last answer, in the form that all dialects share: chat messages. So
going on with one is the same as sending all of it again, and the oldest can be dropped without breaking a newer one.
Who takes most room loses its oldest first. Safe from several threads; called beside the event loop.
"""

import os
import sqlite3
import stat
import threading
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import ConfigError

TABLE = """
CREATE TABLE IF NOT EXISTS conversations (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    answer_id TEXT NOT NULL,
    conversation BLOB NOT NULL,
    UNIQUE (tenant, answer_id)
)
"""
OTHERS = stat.S_IRWXG | stat.S_IRWXO
ROW_BYTES = 200
"""What a row takes beside its messages, about."""


class KeptConversation(msgspec.Struct, frozen=True):
    """All that was said up to an answer, with it."""

    messages: list[dict[str, Any]]
    fields: dict[str, Any] = {}
    """Of the body that began it: those that a dialect does not want to be told again."""
    told: dict[str, Any] = {}
    """The answer as its client was told it, where a dialect lets it be read back."""


class ConversationStore:
    """Kept until there is no more room. Close it."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._database = _opened(path)
        query = "SELECT tenant, SUM(LENGTH(conversation) + ?) FROM conversations GROUP BY tenant"
        self._num_bytes: Counter[str] = Counter(dict(self._database.execute(query, (ROW_BYTES,))))

    @property
    def num_bytes(self) -> int:
        """What is kept, all tenants together."""
        return self._num_bytes.total()

    def keep(self, tenant: str, answer_id: str, conversation: KeptConversation) -> None:
        """A conversation up to this answer."""
        packed = zlib.compress(msgspec.json.encode(conversation), level=1)
        with self._lock:
            num_bytes = self._num_bytes.copy()
            with self._database:
                query = "INSERT INTO conversations (tenant, answer_id, conversation) VALUES (?, ?, ?)"
                self._database.execute(query, (tenant, answer_id, packed))
                num_bytes[tenant] += len(packed) + ROW_BYTES
                while num_bytes.total() > self._max_bytes:
                    largest = max(num_bytes, key=num_bytes.__getitem__)
                    num_bytes[largest] -= self._drop_oldest(largest)
            self._num_bytes = num_bytes  # only now is it on the disk

    def find(self, tenant: str, answer_id: str) -> KeptConversation | None:
        """The tenant's own conversation; None for one that is another's, was dropped, or never was."""
        with self._lock:
            query = "SELECT conversation FROM conversations WHERE tenant = ? AND answer_id = ?"
            row = self._database.execute(query, (tenant, answer_id)).fetchone()
        return None if row is None else msgspec.json.decode(zlib.decompress(row[0]), type=KeptConversation)

    def forget(self, tenant: str, answer_id: str) -> None:
        """The tenant's own conversation is not found any more; those that went on from it are."""
        with self._lock:
            query = "SELECT number, LENGTH(conversation) FROM conversations WHERE tenant = ? AND answer_id = ?"
            row = self._database.execute(query, (tenant, answer_id)).fetchone()
            if row is not None:
                with self._database:
                    freed = self._drop(*row)
                self._num_bytes[tenant] -= freed

    def close(self) -> None:
        """Nothing is kept or found any more."""
        with self._lock:
            self._database.close()

    def _drop_oldest(self, tenant: str) -> int:
        """How many bytes that frees."""
        query = "SELECT number, LENGTH(conversation) FROM conversations WHERE tenant = ? ORDER BY number LIMIT 1"
        return self._drop(*self._database.execute(query, (tenant,)).fetchone())

    def _drop(self, number: int, size: int) -> int:
        self._database.execute("DELETE FROM conversations WHERE number = ?", (number,))
        return int(size) + ROW_BYTES


def opened_store(path: Path | None, max_bytes: int) -> ConversationStore | None:
    """The operator's, if there is to be one."""
    return None if path is None else ConversationStore(path, max_bytes)


def _opened(path: Path) -> sqlite3.Connection:
    """The file, made for its owner alone; one that others can read is refused."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        mode = path.stat().st_mode
        if mode & OTHERS:
            raise ConfigError(
                f"a store must be readable by its owner alone, {path} has mode {stat.S_IMODE(mode):o}; say chmod 600",
                ("store",),
            )
        database = sqlite3.connect(path, check_same_thread=False)
        for line in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL", "PRAGMA secure_delete = ON", TABLE):
            database.execute(line)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"a store must be a file that can be written, {path} cannot: {error}", ("store",)) from error
    return database
