"""A safetensors header is believed only if its tensors fill the file, each once."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.checkpoints.weights import open_weights, read_header
from quire.errors import CheckpointError
from tests.support.errors import raises_code

SOUND = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "U8", "shape": [], "data_offsets": [16, 17]},
}


def write(path: Path, header: Any, data_bytes: int = 17) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(data_bytes))
    return path


def changed(**changes: Any) -> dict[str, Any]:
    return {"a": SOUND["a"] | changes, "b": SOUND["b"]}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    save_file({"x": np.zeros((2, 3), np.float16), "y": np.zeros(0, np.int64)}, tmp_path / "w.safetensors")
    tensors = read_header(tmp_path / "w.safetensors").tensors
    assert {name: (entry.type, entry.shape) for name, entry in tensors.items()} == {
        "x": ("F16", (2, 3)),
        "y": ("I64", (0,)),
    }


def test_a_sound_header_is_sound(tmp_path: Path) -> None:
    assert set(read_header(write(tmp_path / "w.safetensors", SOUND)).tensors) == {"a", "b"}


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (b"", "header_not_json"),
        (b" {}", "header_not_json"),
        (b'{"a": 1, "a": 2}', "not_json"),
        ({"__metadata__": {"x": 1}}, "invalid_metadata"),
        ({"a": 3}, "tensor_incomplete"),
        (changed(dtype="F33"), "unknown_dtype"),
        (changed(dtype=["F32"]), "unknown_dtype"),
        (changed(shape=[-2, -2]), "invalid_tensor_place"),
        (changed(shape=[2, True]), "invalid_tensor_place"),
        (changed(shape=[1] * 9), "invalid_tensor_place"),
        (changed(shape=[2**62, 2**62]), "wrong_tensor_size"),
        (changed(data_offsets=[16, 0]), "wrong_tensor_size"),
        (changed(data_offsets=[0, 16, 17]), "invalid_tensor_place"),
        (changed(data_offsets=[1, 17]), "tensors_not_adjacent"),
        ({"a": SOUND["a"]}, "wrong_data_size"),
        ({}, "wrong_data_size"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, code: str) -> None:
    with raises_code(CheckpointError, code):
        read_header(write(tmp_path / "w.safetensors", header))


@pytest.mark.parametrize("raw", [b"", b"\1\0\0", struct.pack("<Q", 2**63), struct.pack("<Q", 100) + b"{}"])
def test_a_file_too_short_for_its_header_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "w.safetensors").write_bytes(raw)
    with raises_code(CheckpointError, "header_cut_off"):
        read_header(tmp_path / "w.safetensors")


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "name",
    [
        "../w.safetensors",
        "/w.safetensors",
        "a/w.safetensors",
        "..",
        "",
        "w.bin",
        "c:w.safetensors",
        "a\\w.safetensors",
        3,
    ],
)
def test_an_index_may_only_name_weight_files_beside_it(tmp_path: Path, name: Any) -> None:
    index(tmp_path, {"a": name})
    with raises_code(CheckpointError, "unsafe_file_name"):
        open_weights(tmp_path)


def test_a_tensor_in_two_files_or_not_where_the_index_says_is_refused(tmp_path: Path) -> None:
    for name in ("v", "w"):
        write(tmp_path / f"{name}.safetensors", SOUND)
    index(tmp_path, {"a": "v.safetensors", "b": "w.safetensors"})
    with raises_code(CheckpointError, "tensor_in_two_files"):
        open_weights(tmp_path)
    index(tmp_path, {"a": "v.safetensors"})
    with raises_code(CheckpointError, "index_disagrees"):
        open_weights(tmp_path)
    index(tmp_path, {"a": "v.safetensors", "b": "v.safetensors", "c": "v.safetensors"})
    with raises_code(CheckpointError, "index_disagrees"):
        open_weights(tmp_path)
    index(tmp_path, {"a": "gone.safetensors"})
    with raises_code(CheckpointError, "weights_not_readable"):
        open_weights(tmp_path)
    index(tmp_path, [])
    with raises_code(CheckpointError, "weight_map_missing"):
        open_weights(tmp_path)
