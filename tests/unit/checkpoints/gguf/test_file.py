"""The GGUF header is read as it was written, and believed only as far as the file reaches."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader

from quire.checkpoints.gguf.file import TENSOR_TYPES, read_gguf
from quire.errors import CheckpointError
from tests.support.errors import raises_code
from tests.support.models.tiny_models import Tiny, all_metadata, write_gguf


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(
    keys: list[bytes],
    tensors: list[bytes],
    *,
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)


def number_key(name: str, value: int) -> bytes:
    return string(name) + struct.pack("<II", 4, value)


def tensor(name: str, shape: tuple[int, ...], offset: int = 0, kind: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def padded(raw: bytes, data_bytes: int) -> bytes:
    return raw + b"\0" * (-len(raw) % 32) + b"\1" * data_bytes


def refusal(path: Path, raw: bytes) -> CheckpointError:
    path.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    return caught.value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_metadata_is_read_as_it_was_written(path: Path) -> None:
    tiny = Tiny()
    file = read_gguf(write_gguf(path, tiny))
    for key, value in all_metadata(tiny).items():
        assert file.metadata[key] == (pytest.approx(value) if isinstance(value, float) else value), key


def test_tensors_lie_where_the_package_of_the_format_finds_them(path: Path) -> None:
    file = read_gguf(write_gguf(path, Tiny(kind="Q8_0")))
    found = {
        tensor.name: (
            tuple(reversed(tensor.shape.tolist())),
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
        for tensor in GGUFReader(path).tensors
    }
    assert {name: (t.shape, t.type, t.offset, t.num_bytes) for name, t in file.tensors.items()} == found


def test_version_2_is_read_like_version_3(path: Path) -> None:
    path.write_bytes(padded(header([number_key("a", 7)], [tensor("t", (4,))], version=2), 16))
    assert read_gguf(path).metadata == {"a": 7}


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "header_cut_off"),
        (b"PK\3\4" + bytes(60), "magic_missing"),
        (header([], [], version=1), "unsupported_version"),
        (header([], [], version=3 << 24), "big_endian"),
        (header([], [], num_keys=2**63), "too_many_keys"),
        (header([], [], num_keys=60_000), "count_beyond_file"),
        (header([], [], num_tensors=2**64 - 1), "too_many_tensors"),
        (header([struct.pack("<Q", 2**62)], []), "count_beyond_file"),
        (header([number_key("a", 1), number_key("a", 2)], []), "duplicate_key"),
        (header([string("a") + struct.pack("<IIQ", 9, 8, 2**40)], []), "too_many_items"),
        (header([string("a") + struct.pack("<IIQ", 9, 9, 1) + bytes(64)], []), "unknown_metadata_type"),
        (header([string("a") + struct.pack("<I", 99) + bytes(64)], []), "unknown_metadata_type"),
        (header([struct.pack("<Q", 1) + b"\xff" + struct.pack("<II", 4, 1)], []), "string_not_utf8"),
        (header([number_key("general.alignment", 24)], []), "invalid_alignment"),
        (header([], [tensor("t", (1,) * 5)]), "invalid_num_dimensions"),
        (header([], [tensor("t", ())]) + bytes(64), "invalid_num_dimensions"),
        (header([], [tensor("t", (0,))]), "rows_not_whole_blocks"),
        (header([], [tensor("t", (33,), kind=2)]), "rows_not_whole_blocks"),
        (header([], [tensor("t", (2**40, 2**40))]), "tensor_misplaced"),
        (padded(header([], [tensor("t", (4,), offset=8)]), 64), "tensor_misplaced"),
        (padded(header([], [tensor("t", (16,)), tensor("u", (4,), offset=32)]), 64), "tensors_overlap"),
        (padded(header([], [tensor("t", (8,)), tensor("t", (8,), offset=32)]), 64), "duplicate_tensor"),
    ],
)
def test_a_header_that_lies_is_refused(path: Path, raw: bytes, code: str) -> None:
    assert refusal(path, raw).code == code


def test_types_are_as_the_package_knows_them() -> None:
    for number, kind in TENSOR_TYPES.items():
        assert GGMLQuantizationType(number).name == kind.name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (kind.block_values, kind.block_bytes)


def test_a_tensor_type_that_is_not_read_is_named_with_those_that_are(path: Path) -> None:
    error = refusal(path, header([], [tensor("t", (256,), kind=24)]))
    assert error.code == "unsupported_tensor_type"
    assert all(name in str(error) for name in ("I8", *(kind.name for kind in TENSOR_TYPES.values())))
    assert refusal(path, header([], [tensor("t", (256,), kind=4321)])).code == "unsupported_tensor_type"


def test_a_file_cut_anywhere_in_its_header_is_refused(path: Path) -> None:
    raw = write_gguf(
        path, Tiny(metadata={"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.model": "gpt2"})
    ).read_bytes()
    last = read_gguf(path).header_bytes
    for length in range(0, last, 7):
        refusal(path, raw[:length])


def test_a_named_pipe_and_a_missing_file_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with raises_code(CheckpointError, "not_regular_file"):
        read_gguf(tmp_path / "pipe.gguf")
    with raises_code(CheckpointError, "file_not_readable"):
        read_gguf(tmp_path / "missing.gguf")


def test_every_kind_of_number_is_read_little_endian(path: Path) -> None:
    layouts = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    keys = [string(f"k{kind}") + struct.pack(f"<IIQ2{code}", 9, kind, 2, 1, 0) for kind, code in layouts.items()]
    path.write_bytes(header(keys, []))
    assert np.array_equal([read_gguf(path).metadata[f"k{kind}"] for kind in layouts], [[1, 0]] * len(layouts))
