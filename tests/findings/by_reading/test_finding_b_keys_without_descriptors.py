"""By reading: a keys file that changed while no file could be opened locked everybody out."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.api.access import keys
from quire.api.access.keys import KeyRing, add_key


@contextmanager
def no_file_left() -> Iterator[None]:
    """Nothing more can be opened; what is open stays open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError) as refused:  # noqa: PT011 - its number is checked
            os.open(os.devnull, os.O_RDONLY)
        assert refused.value.errno == errno.EMFILE
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_keys_that_were_read_stay_in_force_while_no_file_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "RELOAD_S", 0.0)
    path = tmp_path / "keys.json"
    alice = add_key(path, "alice")
    ring = KeyRing(path)
    assert ring.find(alice) is not None
    bob = add_key(path, "bob")
    with no_file_left():
        is_alice_in, is_locked = ring.find(alice) is not None, ring.is_locked
    assert is_locked
    assert is_alice_in, "locked out by a lack of descriptors"
    assert ring.find(bob) is not None, "read as soon as it can be"
