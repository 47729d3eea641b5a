"""GGUF models in one file, or in several that gguf-split has named NAME-00001-of-00003.gguf.

The path of any of the files selects the model. Each file is validated separately; this module checks that they match.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.checkpoints.gguf.file import GGUFFile, read_gguf
from quire.checkpoints.stored_tensors import StoredTensor
from quire.errors import CheckpointError

PART_NAME = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
MAX_PARTS = 256


@dataclass(frozen=True)
class GGUFParts:
    """The files of a model; the first contains the metadata."""

    parts: tuple[GGUFFile, ...]

    @property
    def path(self) -> Path:
        return self.parts[0].path

    @property
    def metadata(self) -> dict[str, Any]:
        return self.parts[0].metadata

    @property
    def file_bytes(self) -> int:
        return sum(part.file_bytes for part in self.parts)

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        return {name: tensor for part in self.parts for name, tensor in part.tensors.items()}


def part_paths(path: Path) -> list[Path]:
    """Return all files of the model that this file name belongs to, in order."""
    match = PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MAX_PARTS:
        part = f"part {match['number']} of {match['count']} from the name {path.name[:200]!r}"
        message = f"expected a GGUF model of 1 to {MAX_PARTS} files, got {part}; check the name"
        raise CheckpointError(message, code="invalid_part_name")
    suffix = path.name[-len(".gguf") :]
    return [path.with_name(f"{match['name']}-{number:05}-of-{count:05}{suffix}") for number in range(1, count + 1)]


def read_parts(path: Path) -> GGUFParts:
    """Parse and validate the headers of all files. Raises CheckpointError if one is missing or does not match."""
    paths = part_paths(path)
    missing = [part.name for part in paths if part != path and not part.exists()]
    if missing:
        message = f"expected all {len(paths)} files of {path.name} in its folder, {len(missing)} are missing"
        raise CheckpointError(f"{message} (for example {missing[0]}); download all of them", code="parts_missing")
    model = GGUFParts(tuple(map(read_gguf, paths)))
    _check_parts(model)
    return model


def _check_parts(model: GGUFParts) -> None:
    """Check that each file has the right part number and that no tensor is in two files."""
    for number, part in enumerate(model.parts):
        stored = tuple(part.metadata.get(f"split.{key}", default) for key, default in (("no", 0), ("count", 1)))
        expected = (number, len(model.parts))
        if stored not in (expected, (0, 0)) or (stored == (0, 0) and len(model.parts) > 1):
            message = f"expected {part.path.name} to be part {number + 1} of {len(model.parts)} by its name"
            header = f"got {stored[0]} of {stored[1]} (counted from 0) by its header"
            hint = "restore the original file names, or join the files with gguf-split"
            raise CheckpointError(f"{message}, {header}; {hint}", code="wrong_part_number")
    num_tensors = sum(len(part.tensors) for part in model.parts)
    if len(model.tensors) != num_tensors:
        duplicates = f"{num_tensors - len(model.tensors)} tensors of {model.path.name} in several"
        message = f"expected each tensor in one part, got {duplicates}; download the files again"
        raise CheckpointError(message, code="tensor_in_several_parts")
    num_stored = model.metadata.get("split.tensors.count", num_tensors)
    if num_stored != num_tensors:
        message = f"expected {num_stored} tensors in the parts of {model.path.name}, got {num_tensors}"
        raise CheckpointError(f"{message}; download them again", code="wrong_num_tensors")
