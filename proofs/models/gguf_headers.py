"""Writes the metadata and tensor shapes of GGUF files of every family, as llama.cpp's converter creates them.

`python -m proofs.models.gguf_headers` writes tests/data/gguf_headers.json, so that tests have real headers without the
converter. Run it when a family is added, or for a newer converter.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf

from benchmarks.record import ROOT
from proofs.hybrids import parity as hybrids_parity
from proofs.models import parity as models_parity
from proofs.models.llamacpp_converter import convert
from proofs.models.llamacpp_source import PACKAGE, VERSION
from tests.support.models import architectures

TARGET = ROOT / "tests" / "data" / "gguf_headers.json"
FACTORS = "rope_freqs.weight"


def header_of(file: Path) -> dict[str, Any]:
    """Return the metadata without the tokenizer's, the shapes of tensors, and the RoPE factors."""
    reader = gguf.GGUFReader(file)
    metadata = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not key.startswith(("GGUF.", "tokenizer.", "general.")) or key == "general.architecture"
    }
    shapes = {tensor.name: [int(size) for size in reversed(tensor.shape)] for tensor in reader.tensors}
    factors = [tensor.data.tolist() for tensor in reader.tensors if tensor.name == FACTORS]
    return {"keys": metadata, "shapes": shapes, "factors": factors[0] if factors else None}


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        found = {
            name: header_of(convert(architectures.directory(name), Path(scratch) / f"{name}.gguf"))
            for name in models_parity.MODELS | architectures.HYBRIDS
            if name not in models_parity.NOT_IN_GGUF | hybrids_parity.NOT_IN_GGUF
        }
    TARGET.parent.mkdir(exist_ok=True)
    made_by = f"llama.cpp's converter in {PACKAGE} {VERSION}"
    lines = [f"{json.dumps(name)}: {json.dumps(header)}" for name, header in found.items()]
    TARGET.write_text('{"made_by": ' + json.dumps(made_by) + ",\n" + ",\n".join(lines) + "}\n")
