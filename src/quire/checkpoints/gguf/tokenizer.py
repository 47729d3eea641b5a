"""Builds tokenizer.json from the vocabulary in a GGUF file's metadata, with the `tokenizers` library.

Two kinds are supported: byte-level BPE ("gpt2"), where the file lists merges and `tokenizer.ggml.pre` names the
pre-tokenizer; and SentencePiece BPE, whose merges are derived from token scores ("llama") or listed ("gemma4").
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.checkpoints.gguf.config import Metadata, unsupported_model
from quire.checkpoints.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from quire.checkpoints.strict_json import canonical_json
from quire.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MAX_TOKEN_CHARACTERS = 256
MAX_SPLITS = 4_000_000
SENTENCEPIECE_MODELS = frozenset({"llama", "gemma4"})
MODELS = ("gpt2", *sorted(SENTENCEPIECE_MODELS))


def write_tokenizer(metadata: Metadata, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and any chat_template.jinja. Raises CheckpointError."""
    vocabulary = _Vocabulary(metadata)
    try:
        tokenizer = _build(vocabulary)
    except (KeyboardInterrupt, SystemExit, CheckpointError):
        raise
    except BaseException as error:  # a Rust panic is raised as a BaseException
        message = f"the tokenizer in the GGUF file cannot be built: {str(error)[:200]}; download the file again"
        raise CheckpointError(message, code="invalid_tokenizer") from error
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(canonical_json(_tokenizer_config(vocabulary)))
    if template := metadata.text("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")


class _Vocabulary:
    """The tokens in the metadata, validated."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.model = metadata.text("tokenizer.ggml.model")
        self.tokens: list[str] = _read_array(metadata, "tokens", str)
        self.size = len(self.tokens)
        self.types: list[int] = _read_array(metadata, "token_type", int, default=[NORMAL] * self.size)
        if not self.tokens or len(set(self.tokens)) != self.size or len(self.types) != self.size:
            message = "expected tokenizer.ggml.tokens to be distinct strings, each with a token_type"
            counts = f"{self.size:,} tokens, {len(set(self.tokens)):,} distinct, and {len(self.types):,} types"
            raise CheckpointError(f"{message}, got {counts}; download the file again", code="invalid_tokens")

    def special(self, kind: str) -> str | None:
        """Return the text of the bos, eos, unknown or padding token."""
        token = self.metadata.token_id(f"tokenizer.ggml.{kind}_token_id", self.size)
        return None if token is None else self.tokens[token]

    def of_types(self, *types: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    @property
    def is_sentencepiece(self) -> bool:
        """Whether the tokenizer is SentencePiece BPE; otherwise it is byte-level BPE."""
        return self.model in SENTENCEPIECE_MODELS

    @property
    def pre_tokenizer(self) -> PreTokenizer:
        """The pre-tokenizer."""
        pre = self.metadata.text("tokenizer.ggml.pre", "default") or ""
        if pre not in PRE_TOKENIZERS:
            message = f"expected a pre-tokenizer of {', '.join(sorted(PRE_TOKENIZERS))}, got {pre[:40]!r}"
            raise unsupported_model("unsupported_pre_tokenizer", message)
        return PRE_TOKENIZERS[pre]

    def merges(self) -> list[tuple[str, str]]:
        """Return the listed merges; the file separates the two tokens by a space."""
        pairs = (merge.partition(" ") for merge in _read_array(self.metadata, "merges", str))
        return [(left, right) for left, _, right in pairs]


def _build(vocabulary: _Vocabulary) -> "Tokenizer":
    from tokenizers import AddedToken

    if vocabulary.model not in MODELS:
        message = f"expected a tokenizer of {', '.join(MODELS)}, got {str(vocabulary.model)[:40]!r}"
        raise unsupported_model("unsupported_tokenizer", message)
    tokenizer = _sentencepiece(vocabulary) if vocabulary.is_sentencepiece else _byte_level(vocabulary)
    special = vocabulary.of_types(CONTROL, UNKNOWN) if vocabulary.is_sentencepiece else vocabulary.of_types(CONTROL)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special if text])
    added_texts = [text for text in vocabulary.of_types(USER_DEFINED) if text]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added_texts])
    _add_post_processor(tokenizer, vocabulary)
    return tokenizer


def _byte_level(vocabulary: _Vocabulary) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    settings = vocabulary.pre_tokenizer
    # Unused entries pad the list to the embedding's size and are not tokens.
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind != UNUSED
    }
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=vocabulary.merges(), ignore_merges=settings.ignores_merges))
    if settings.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = settings.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    metadata = vocabulary.metadata
    if metadata.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        message = "expected a tokenizer that keeps white space, got a tokenizer that removes some"
        raise unsupported_model("white_space_removed", message)
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.special("unknown") or next(iter(vocabulary.of_types(UNKNOWN)), None)
    merges = _merges_by_score(vocabulary) if vocabulary.model == "llama" else vocabulary.merges()
    model = models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    has_space_prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    prefix_step: list[Any] = [normalizers.Prepend("▁")] if has_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix_step, normalizers.Replace(" ", "▁")])
    decoder_steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip_step: list[Any] = [decoders.Strip(content=" ", left=1)] if has_space_prefix else []
    tokenizer.decoder = decoders.Sequence([*decoder_steps, *strip_step])
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Derive merges from scores, because SentencePiece joins the adjacent pair whose joined token has the highest
    score. Each split of a token into two tokens is a merge, ranked by the score of the whole token."""
    scores = _read_array(vocabulary.metadata, "scores", float)
    if len(scores) != vocabulary.size or any(math.isnan(score) for score in scores):
        message = f"expected tokenizer.ggml.scores to be {vocabulary.size:,} numbers, one for each token"
        raise CheckpointError(f"{message}; download the file again", code="wrong_num_scores")
    token_types = zip(vocabulary.tokens, vocabulary.types, strict=True)
    ids = {token: index for index, (token, kind) in enumerate(token_types) if kind in (NORMAL, UNUSED)}
    num_splits = sum(map(len, ids))
    if num_splits > MAX_SPLITS or max(map(len, ids), default=0) > MAX_TOKEN_CHARACTERS:
        message = f"expected tokens of at most {MAX_TOKEN_CHARACTERS} characters, {MAX_SPLITS:,} in all"
        counts = f"up to {max(map(len, ids)):,} characters and {num_splits:,} in all"
        raise unsupported_model("tokens_too_long", f"{message}, got {counts}")
    merges = []
    for piece, index in ids.items():
        for length in range(1, len(piece)):
            left, right = piece[:length], piece[length:]
            if left in ids and right in ids:
                merges.append((-scores[index], index, ids[left], ids[right]))
    merges.sort()
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, _, left, right in merges]


def _add_post_processor(tokenizer: "Tokenizer", vocabulary: _Vocabulary) -> None:
    """Make the tokenizer add bos before or eos after a text, if the file or the kind of tokenizer demands it."""
    from tokenizers import processors

    bos, eos = _bos_and_eos(vocabulary)
    if not bos and not eos:
        return
    end_tokens = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys(filter(None, (bos, eos)))]
    names = {text: f"T{index}" for index, (text, _) in enumerate(end_tokens)}
    single = [f"{names[bos]}:0"] if bos else []
    single += ["$A:0"] + ([f"{names[eos]}:0"] if eos else [])
    pair = [*single, *(part.replace(":0", ":1").replace("$A", "$B") for part in single)]
    specials: list[Any] = [{"id": names[text], "ids": [token], "tokens": [text]} for text, token in end_tokens]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=specials)


def _bos_and_eos(vocabulary: _Vocabulary) -> tuple[str | None, str | None]:
    metadata = vocabulary.metadata
    default = vocabulary.is_sentencepiece or vocabulary.pre_tokenizer.has_bos
    bos = vocabulary.special("bos") if metadata.flag("tokenizer.ggml.add_bos_token", default) else None
    eos = vocabulary.special("eos") if metadata.flag("tokenizer.ggml.add_eos_token", False) else None
    return bos, eos


def _tokenizer_config(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    bos, eos = _bos_and_eos(vocabulary)
    description: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bos is not None,
        "add_eos_token": eos is not None,
    }
    for key, kind in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        if (text := vocabulary.special(kind)) is not None:
            description[f"{key}_token"] = text
    return description


def _read_array(metadata: Metadata, name: str, item_type: type, default: list[Any] | None = None) -> list[Any]:
    key = f"tokenizer.ggml.{name}"
    value = metadata.values.get(key, default)
    if not isinstance(value, list) or not all(type(item) is item_type for item in value):
        message = f"expected {key} to be an array of {item_type.__name__}"
        raise CheckpointError(f"{message}; download the file again", code=f"invalid_{name}")
    return value
