"""Conversations that clients continue by an id: stored in one SQLite file, each for its tenant alone.

A conversation is kept whole under the id of its last answer, in the form that all dialects share: chat messages. So
continuing one is the same as sending all of it again, and the oldest can be dropped without breaking a newer one. The
tenant that takes most room loses its oldest first. Safe from several threads; called beside the event loop.

A file has one server at a time, by a lock beside it: each counts the bytes that it stores.
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
"""A full disk is logged once in so many seconds, not for every conversation."""
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
    """All messages up to an answer, with it."""

    messages: list[dict[str, Any]]
    fields: dict[str, Any] = {}
    """Of its first body: those that later bodies may omit."""
    response: dict[str, Any] = msgspec.field(default_factory=dict, name="told")
    """The response as it was sent, where a dialect lets it be read back."""


class ConversationStore:
    """Kept until there is no more room. Close it."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._logged_s = float("-inf")
        with ExitStack() as held:
            held.callback(os.close, _locked(path))
            self.database = _opened(path)
            self._held = held.pop_all()
        query = "SELECT tenant, SUM(LENGTH(conversation) + ?) FROM conversations GROUP BY tenant"
        self._num_bytes: Counter[str] = Counter(dict(self.database.execute(query, (ROW_BYTES,))))

    @property
    def num_bytes(self) -> int:
        return self._num_bytes.total()

    def keep(self, tenant: str, answer_id: str, conversation: KeptConversation) -> bool:
        """A conversation up to this answer; false where the disk takes no more."""
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
            except sqlite3.IntegrityError:  # of an id that was kept before: a bug
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
        self._num_bytes = num_bytes  # only now is it on the disk

    def _make_room(self) -> None:
        """The disk is full: the largest tenant loses its oldest, and the journal gives back what it holds."""
        self.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        largest = max(self._num_bytes, key=self._num_bytes.__getitem__)
        with self.database:
            freed = self._drop_oldest(largest)
        self._num_bytes[largest] -= freed
        self.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _log(self, error: sqlite3.Error) -> None:
        now_s = monotonic()
        if now_s - self._logged_s >= LOG_S:
            self._logged_s = now_s
            LOG.error("cannot store conversations: %s; responses have store false until storing works again", error)

    def find(self, tenant: str, answer_id: str) -> KeptConversation | None:
        """The tenant's own conversation; None for one that is another's, was dropped, or never was."""
        with self._lock:
            query = "SELECT conversation FROM conversations WHERE tenant = ? AND answer_id = ?"
            row = self.database.execute(query, (tenant, answer_id)).fetchone()
        return None if row is None else msgspec.json.decode(zlib.decompress(row[0]), type=KeptConversation)

    def forget(self, tenant: str, answer_id: str) -> None:
        """The tenant's own conversation is not found any more; those that went on from it are."""
        with self._lock:
            query = "SELECT number, LENGTH(conversation) FROM conversations WHERE tenant = ? AND answer_id = ?"
            row = self.database.execute(query, (tenant, answer_id)).fetchone()
            if row is not None:
                with self.database:
                    freed = self._drop(*row)
                self._num_bytes[tenant] -= freed

    def close(self) -> None:
        """Nothing is kept or found any more."""
        with self._lock:
            self.database.close()
            self._held.close()

    def _drop_oldest(self, tenant: str) -> int:
        """How many bytes that frees."""
        query = "SELECT number, LENGTH(conversation) FROM conversations WHERE tenant = ? ORDER BY number LIMIT 1"
        return self._drop(*self.database.execute(query, (tenant,)).fetchone())

    def _drop(self, number: int, size: int) -> int:
        self.database.execute("DELETE FROM conversations WHERE number = ?", (number,))
        return int(size) + ROW_BYTES


def opened_store(path: Path | None, max_bytes: int) -> ConversationStore | None:
    """The operator's, if there is to be one."""
    return None if path is None else ConversationStore(path, max_bytes)


def _locked(path: Path) -> int:
    """A descriptor that holds the store's lock as long as it is open. A file beside it: SQLite locks its own."""
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"expected a writable file as store, cannot write {path}: {error}", ("store",)) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(
            f"expected a store that no other server uses, another server keeps its conversations in {path}; choose "
            "another file, or stop that server",
            ("store",),
        ) from error
    return descriptor


def _opened(path: Path) -> sqlite3.Connection:
    """The file, made for its owner alone; one that others can read is refused."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        mode = path.stat().st_mode
        if mode & OTHERS:
            raise ConfigError(
                f"expected a store that only its owner can read, {path} has mode {stat.S_IMODE(mode):o}; run chmod 600",
                ("store",),
                code="store_not_private",
            )
        database = sqlite3.connect(path, check_same_thread=False)
        for line in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL", "PRAGMA secure_delete = ON", TABLE):
            database.execute(line)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"expected a writable file as store, cannot write {path}: {error}", ("store",)) from error
    return database
