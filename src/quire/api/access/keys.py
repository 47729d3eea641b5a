"""API keys: random, stored as SHA-256 in a file that only its owner can read, and compared in constant time.

A key has 256 random bits, so an unsalted hash is safe against guessing. The file is reloaded when it changes, so a
revoked key is refused within a second, without a restart. If the file cannot be read, all requests are rejected, unless
the process has run out of file descriptors: then the keys read last stay valid, and reading is retried.
"""

import errno
import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
from msgspec.structs import replace

from quire.config.server_settings import NAME
from quire.core.request import PriorityClass
from quire.errors import ConfigError

PREFIX = "quire-"
RANDOM_BYTES = 32
RELOAD_S = 1.0
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of opening a file whose cause is not the file, but a shortage in the process or system."""
LOG = logging.getLogger("quire.keys")


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key as the file has it; default values are omitted. The key's name is the name of its tenant."""

    name: str
    sha256: str
    max_class: str = PriorityClass.NORMAL.value
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    created: str = ""
    admin: bool = False
    """Whether the key also grants access to the operator's routes."""
    cache_group: str = ""
    """Keys of the same group share cached blocks. Empty: this key shares none."""

    def __post_init__(self) -> None:
        _check_name("key", self.name, "its user, such as alice or ci-bot", "invalid_key_name")
        users = "the users that may notice each other's prompts, such as team-a"
        _check_name("cache group", self.cache_group or self.name, users, "invalid_cache_group")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ConfigError(f"key {self.name}: expected 64 hexadecimal digits as sha256; create the key again")
        classes = [priority.value for priority in PriorityClass]
        if self.max_class not in classes:
            message = f"key {self.name}: expected max_class to be one of {', '.join(classes)}, got {self.max_class!r}"
            raise ConfigError(message, code="unknown_max_class")
        for field in ("requests_per_minute", "tokens_per_minute", "concurrent"):
            value = getattr(self, field)
            if value is not None and value < 1:
                message = f"key {self.name}: expected {field} of at least 1, got {value}; leave it out for no limit"
                raise ConfigError(message, code="invalid_key_limit")

    @property
    def ceiling(self) -> PriorityClass:
        """The most urgent priority class that the key may request."""
        return PriorityClass(self.max_class)


def _check_name(kind: str, name: str, example: str, code: str) -> None:
    if not re.fullmatch(NAME, name):
        message = f"expected a {kind} name of up to 64 letters, digits, dots, dashes and underscores, got {name!r}"
        raise ConfigError(f"{message}; name it after {example}", code=code)


def digest_of(secret: str) -> str:
    """Return the hash under which a key is stored."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def find(keys: Sequence[Key], secret: str) -> Key | None:
    """Return the key with this secret, or None. The time taken does not depend on whether, or which, key matches."""
    digest, match = digest_of(secret), None
    for key in keys:
        if hmac.compare_digest(key.sha256, digest):
            match = key
    return match


class DescriptorShortageError(ConfigError):
    """The process has too many open files to read the keys file, whose content may be valid."""

    code = "too_many_open_files"


# -- the file ----------------------------------------------------------------------------------------------------------


def read_keys(path: Path) -> tuple[Key, ...] | None:
    """Return the keys in the file; None if there is no file. Raises ConfigError if it is unreadable, damaged, or
    accessible to other users."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            raw = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        error_type = DescriptorShortageError if error.errno in SHORTAGES else ConfigError
        raise error_type(f"cannot read the keys file {path}: {error.strerror}; check its owner") from error
    if mode & 0o077:
        message = f"expected a keys file that only its owner can read, got mode {mode:04o}; run: chmod 600 {path}"
        raise ConfigError(message, code="keys_file_not_private")
    try:
        keys = tuple(msgspec.json.decode(raw, type=_File).keys)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"the keys file {path} is damaged: {error}; restore it, or create the keys again") from error
    if len({key.name for key in keys}) != len(keys):
        raise ConfigError(f"the keys file {path} has two keys with the same name; remove one", code="duplicate_keys")
    return keys


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Key]


def write_keys(path: Path, keys: Sequence[Key]) -> None:
    """Replace the file atomically; only the owner can read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(_File(list(keys))), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def add_key(path: Path, name: str, **terms: Any) -> str:
    """Create a key and return its secret, which is not stored. Raises ConfigError if the name is taken."""
    secret = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    key = Key(name, digest_of(secret), created=created, **terms)
    with _file_lock(path):
        keys = read_keys(path) or ()
        if any(existing.name == name for existing in keys):
            message = f"expected an unused key name, got {name!r}; revoke that key, or choose another name"
            raise ConfigError(message, code="key_name_taken")
        write_keys(path, [*keys, key])
    return secret


def revoke_key(path: Path, name: str) -> None:
    """Remove a key, which is then refused. With an empty keys file, all requests are refused."""
    with _file_lock(path):
        keys = _keys_including(path, name)
        write_keys(path, [key for key in keys if key.name != name])


def group_key(path: Path, name: str, cache_group: str) -> None:
    """Set the group of keys with which this key shares cached blocks; empty: it shares none."""
    with _file_lock(path):
        keys = _keys_including(path, name)
        write_keys(path, [replace(key, cache_group=cache_group) if key.name == name else key for key in keys])


def _keys_including(path: Path, name: str) -> Sequence[Key]:
    """Return all keys. Raises ConfigError if none has this name."""
    keys = read_keys(path) or ()
    if not any(key.name == name for key in keys):
        names = ", ".join(key.name for key in keys) or "none"
        raise ConfigError(f"there is no key {name!r}; the keys are: {names}", code="unknown_key")
    return keys


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Hold a lock on the file from reading to writing; otherwise a concurrent change could restore a revoked key."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)  # the folder is locked, because every change replaces the file
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# -- while serving -----------------------------------------------------------------------------------------------------


class KeyRing:
    """The valid keys. Without a keys file every client is admitted.

    Once a keys file was read, keys stay required: if the file disappears, all requests are rejected.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._next_reload_s = 0.0
        self._keys: tuple[Key, ...] | None = None
        self._stamp: tuple[int, ...] | None = None
        self.problem: str | None = None
        """Why the file cannot be read; until it can be, all requests are rejected. None: no problem."""

    @property
    def is_locked(self) -> bool:
        """Whether requests need a key."""
        self._reload()
        return self._keys is not None

    def find(self, secret: str) -> Key | None:
        """Return the valid key with this secret, if any."""
        self._reload()
        return find(self._keys or (), secret)

    def _reload(self) -> None:
        now_s = monotonic()
        if self._path is None or now_s < self._next_reload_s:
            return
        self._next_reload_s = now_s + RELOAD_S
        stamp = _stamp(self._path)
        if stamp == self._stamp and self.problem is None:
            return
        was_locked = self._keys is not None
        try:
            keys = read_keys(self._path)
            self.problem = f"the keys file {self._path} is gone; restore it" if keys is None and was_locked else None
        except DescriptorShortageError as error:
            if was_locked:
                LOG.error("keeping the keys that were read last: %s", error)
                return
            keys, self.problem = (), str(error)
        except ConfigError as error:
            keys, self.problem = (), str(error)
        self._keys, self._stamp = () if keys is None and was_locked else keys, stamp
        if self.problem is not None:
            LOG.error("rejecting all requests: %s", self.problem)


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes when the file's content, owner or mode may have changed; None if there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        # Not None: the file may exist and be unreadable.
        return (-1, error.errno or 0)
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
