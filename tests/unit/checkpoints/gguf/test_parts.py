"""A GGUF model in several files is the model in one."""

from pathlib import Path

import gguf
import pytest
from gguf import GGUFReader, GGUFWriter

from quire.checkpoints import resolve
from quire.checkpoints.gguf.parts import MAX_PARTS, part_paths, read_parts
from quire.errors import CheckpointError
from tests.support.errors import raises_code
from tests.support.models.tiny_models import Tiny, write_gguf


def split(path: Path, folder: Path, count: int = 2, **claims: int) -> list[Path]:
    """As gguf-split does: metadata in the first, tensors dealt out."""
    reader = GGUFReader(path)
    paths = [folder / f"tiny-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    for number, part in enumerate(paths):
        writer = GGUFWriter(part, "llama")
        if number == 0:
            for key, value in reader.fields.items():
                if not key.startswith(("GGUF.", "general.architecture")):
                    writer.add_key_value(key, value.contents(), value.types[0], *value.types[1:2])
        writer.add_uint16("split.no", claims.get("no", number))
        writer.add_uint16("split.count", claims.get("of", count))
        writer.add_int32("split.tensors.count", claims.get("tensors", len(reader.tensors)))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=gguf.GGMLQuantizationType(tensor.tensor_type))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "whole.gguf", Tiny())


def test_parts_are_the_model_they_were_cut_from(whole: Path, tmp_path: Path) -> None:
    parts = split(whole, tmp_path, 3)
    one = resolve(str(whole), cache=tmp_path / "a")
    for part in parts:  # any of them names it
        several = resolve(str(part), cache=tmp_path / "b")
        assert several.config == one.config
        assert {name: (t.type, t.shape) for name, t in several.tensors.items()} == {
            name: (t.type, t.shape) for name, t in one.tensors.items()
        }
        assert {tensor.path for tensor in several.tensors.values()} == set(parts)


def test_a_part_that_is_missing_is_named(whole: Path, tmp_path: Path) -> None:
    first, second = split(whole, tmp_path)
    second.unlink()
    with raises_code(CheckpointError, "parts_missing") as caught:
        read_parts(first)
    assert second.name in str(caught.value)


@pytest.mark.parametrize(
    ("claims", "code"),
    [
        ({"no": 0}, "wrong_part_number"),
        ({"of": 3}, "wrong_part_number"),
        ({"tensors": 99}, "wrong_num_tensors"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    whole: Path, tmp_path: Path, claims: dict[str, int], code: str
) -> None:
    first, _ = split(whole, tmp_path, **claims)
    with raises_code(CheckpointError, code):
        read_parts(first)


def test_a_tensor_in_two_parts_is_refused(whole: Path, tmp_path: Path) -> None:
    first, second = split(whole, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    again = split(whole, other, 1, no=1, of=2)[0]
    second.unlink()
    again.rename(second)
    with raises_code(CheckpointError, "tensor_in_several_parts"):
        read_parts(first)


def test_a_part_under_another_name_says_what_it_is(whole: Path, tmp_path: Path) -> None:
    renamed = split(whole, tmp_path)[1].rename(tmp_path / "alone.gguf")
    with raises_code(CheckpointError, "wrong_part_number"):
        read_parts(renamed)


@pytest.mark.parametrize(
    "name", ["a-00003-of-00002.gguf", "a-00000-of-00002.gguf", f"a-00001-of-{MAX_PARTS + 1:05}.gguf"]
)
def test_a_name_that_no_model_has_is_refused(name: str) -> None:
    with raises_code(CheckpointError, "invalid_part_name"):
        part_paths(Path(name))
