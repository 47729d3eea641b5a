"""Stored conversations that clients continue by id, in one SQLite file. Each is accessible to its tenant only.

A conversation is stored completely under the id of its last answer, as chat messages, the format that all dialects
share. So continuing by id equals resending all messages, and dropping old conversations does not break newer ones. When
the store is full, the tenant with most bytes loses its oldest conversations. Thread-safe; called from worker threads.

A lock file next to the store lets only one server use it at a time, because each server counts the stored bytes itself.
"""

import fcntl
import logging
import os
import sqlite3
import stat
import threading
import zlib
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from quire.errors import ConfigError

LOG = logging.getLogger("quire.api")
LOG_S = 60.0
"""Minimum interval between log lines about failed writes."""
TABLE = """
CREATE TABLE IF NOT EXISTS conversations (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    answer_id TEXT NOT NULL,
    conversation BLOB NOT NULL,
    UNIQUE (tenant, answer_id)
)
"""
NOT_OWNER_BITS = stat.S_IRWXG | stat.S_IRWXO
ROW_BYTES = 200
"""Approximate size of a row without its messages."""


class KeptConversation(msgspec.Struct, frozen=True):
    """All messages of a conversation, including the last answer."""

    messages: list[dict[str, Any]]
    fields: dict[str, Any] = {}
    """Fields of the first request body that later bodies may omit, such as the system text."""
    response: dict[str, Any] = msgspec.field(default_factory=dict, name="told")
    """The response as it was sent, for APIs with a route that returns it."""


class ConversationStore:
    """A store of at most `max_bytes`. Must be closed."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._last_log_s = float("-inf")
        with ExitStack() as stack:
            self.database = _open_database(path, stack)
            self._lock_file = stack.pop_all()
        query = "SELECT tenant, SUM(LENGTH(conversation) + ?) FROM conversations GROUP BY tenant"
        self._num_bytes: Counter[str] = Counter(dict(self.database.execute(query, (ROW_BYTES,))))

    @property
    def num_bytes(self) -> int:
        return self._num_bytes.total()

    def keep(self, tenant: str, answer_id: str, conversation: KeptConversation) -> bool:
        """Store a conversation under its last answer's id. Return whether it could be written."""
        packed = zlib.compress(msgspec.json.encode(conversation), level=1)
        with self._lock:
            try:
                try:
                    self._insert(tenant, answer_id, packed)
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode != sqlite3.SQLITE_FULL or not self._num_bytes.total():
                        raise
                    self._make_room()
                    self._insert(tenant, answer_id, packed)
            except sqlite3.IntegrityError:  # a duplicate id, which is a bug
                raise
            except sqlite3.Error as error:
                self._log(error)
                return False
        return True

    def _insert(self, tenant: str, answer_id: str, packed: bytes) -> None:
        num_bytes = self._num_bytes.copy()
        with self.database:
            query = "INSERT INTO conversations (tenant, answer_id, conversation) VALUES (?, ?, ?)"
            self.database.execute(query, (tenant, answer_id, packed))
            num_bytes[tenant] += len(packed) + ROW_BYTES
            while num_bytes.total() > self._max_bytes:
                largest = max(num_bytes, key=num_bytes.__getitem__)
                num_bytes[largest] -= self._drop_oldest(largest)
        self._num_bytes = num_bytes  # updated after the transaction was committed

    def _make_room(self) -> None:
        """Free space on a full disk: drop the largest tenant's oldest conversation, and truncate the journal."""
        self.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        largest = max(self._num_bytes, key=self._num_bytes.__getitem__)
        with self.database:
            freed = self._drop_oldest(largest)
        self._num_bytes[largest] -= freed
        self.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _log(self, error: sqlite3.Error) -> None:
        now_s = monotonic()
        if now_s - self._last_log_s >= LOG_S:
            self._last_log_s = now_s
            LOG.error('cannot store conversations: %s; until that works again, responses have "store": false', error)

    def find(self, tenant: str, answer_id: str) -> KeptConversation | None:
        """Return the tenant's conversation; None if it was dropped, never existed, or belongs to another tenant."""
        with self._lock:
            query = "SELECT conversation FROM conversations WHERE tenant = ? AND answer_id = ?"
            row = self.database.execute(query, (tenant, answer_id)).fetchone()
        return None if row is None else msgspec.json.decode(zlib.decompress(row[0]), type=KeptConversation)

    def forget(self, tenant: str, answer_id: str) -> None:
        """Delete the tenant's conversation, but not the conversations that continue it."""
        with self._lock:
            query = "SELECT number, LENGTH(conversation) FROM conversations WHERE tenant = ? AND answer_id = ?"
            row = self.database.execute(query, (tenant, answer_id)).fetchone()
            if row is not None:
                with self.database:
                    freed = self._drop(*row)
                self._num_bytes[tenant] -= freed

    def close(self) -> None:
        """Close the database and release the lock."""
        with self._lock:
            self.database.close()
            self._lock_file.close()

    def _drop_oldest(self, tenant: str) -> int:
        """Drop the tenant's oldest conversation; return the bytes freed."""
        query = "SELECT number, LENGTH(conversation) FROM conversations WHERE tenant = ? ORDER BY number LIMIT 1"
        return self._drop(*self.database.execute(query, (tenant,)).fetchone())

    def _drop(self, number: int, size: int) -> int:
        self.database.execute("DELETE FROM conversations WHERE number = ?", (number,))
        return int(size) + ROW_BYTES


def _open_database(path: Path, stack: ExitStack) -> sqlite3.Connection:
    """Open the database file, created with mode 0600. Raises ConfigError if it has a wider mode or cannot be written.
    `stack` releases the lock, which is on a separate file because SQLite locks the database file itself."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _lock_store(path, stack)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        mode = path.stat().st_mode
        if mode & NOT_OWNER_BITS:
            raise ConfigError(
                f"expected a store only its owner can read, got {path} with mode {stat.S_IMODE(mode):o}; run chmod 600",
                ("store",),
                code="store_not_private",
            )
        database = sqlite3.connect(path, check_same_thread=False)
        for line in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL", "PRAGMA secure_delete = ON", TABLE):
            database.execute(line)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"expected a writable file as store, cannot write {path}: {error}", ("store",)) from error
    return database


def _lock_store(path: Path, stack: ExitStack) -> None:
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"expected a store that no other server uses, another server keeps its conversations in {path}; choose "
            "another file, or stop that server",
            ("store",),
        ) from error
