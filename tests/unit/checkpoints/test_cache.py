"""The cache folder is where the environment says, and holds only what is whole."""

import os
from pathlib import Path

import pytest

from quire.checkpoints.cache import UNFINISHED, cache_folder, converted_directory, put_in_place


def test_the_folder_is_quires_own_then_xdgs_then_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/quire")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/quire")
    monkeypatch.setenv("QUIRE_CACHE", "~/mine")
    assert cache_folder() == Path("/home/someone/mine")


def test_a_name_becomes_one_plain_folder_name() -> None:
    made = converted_directory(Path("/c"), "../odd name/é", "k" * 32)
    assert made.parent == Path("/c/converted")
    assert made.name.isascii()
    assert not made.name.startswith(".")


def test_what_fails_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with put_in_place(tmp_path / "converted" / "x") as fresh:
            (fresh / "half").write_text("half")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        fail()
    assert list((tmp_path / "converted").iterdir()) == []


def test_what_a_killed_process_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    old, young = (tmp_path / f"{UNFINISHED}{age}" for age in ("old", "young"))
    for left in (old, young):
        left.mkdir()
    os.utime(old, (0, 0))
    with put_in_place(tmp_path / "x"):
        pass
    assert (old.exists(), young.exists(), (tmp_path / "x").is_dir()) == (False, True, True)


def test_the_second_to_finish_keeps_the_firsts_work(tmp_path: Path) -> None:
    with put_in_place(tmp_path / "x") as second:
        (second / "by").write_text("second")
        with put_in_place(tmp_path / "x") as first:
            (first / "by").write_text("first")
    assert (tmp_path / "x" / "by").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
