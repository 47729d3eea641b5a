"""Finds the model variants in a Hub repository and chooses one that fits in memory. Pure logic on names and sizes.

The rule, in full:

1. A variant is one GGUF model (a file, or all parts of a split one), or all safetensors files of the repository.
2. A variant fits if its `needed_bytes` is at most the memory: the weights as quire keeps them in memory, with an
   allowance for derived data, the program itself, and the KV cache of a conversation.
3. Of the variants that fit, GGUF is preferred to safetensors, then the most bits per weight up to `MAX_BITS` (about
   eight). More bits do not visibly improve responses, but cost memory bandwidth for every token. So if all variants
   have more bits, the variant with the fewest is chosen.
4. Ties go to the smaller variant, then to the first by name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter

from quire.checkpoints.gguf.parts import PART_NAME
from quire.errors import CheckpointError

GIB = 1 << 30
WEIGHTS_SHARE = 1.15
PROGRAM_BYTES = int(0.4 * GIB)
CONVERSATION_BYTES = int(0.5 * GIB)
MAX_BITS = 8.6
"""Preferred maximum of bits per weight: just above Q8_0, which has 8.5 bits per weight with its scales."""
BITS = {
    "F32": 32.0, "F16": 16.0, "BF16": 16.0, "Q8_0": 8.5, "Q6_K": 6.6, "Q5_1": 6.0, "Q5_K_M": 5.7, "Q5_K_S": 5.5,
    "Q5_0": 5.5, "Q4_1": 5.0, "Q4_K_M": 4.8, "Q4_K_S": 4.6, "Q4_0": 4.5, "IQ4_NL": 4.5, "IQ4_XS": 4.25, "MXFP4": 4.25,
}  # fmt: skip
WIDENED_BITS = {
    "Q3_K_L": 4.3, "Q3_K_M": 3.9, "Q3_K_S": 3.5, "Q2_K": 3.0, "Q2_K_S": 2.8, "IQ3_M": 3.7, "IQ3_S": 3.4, "IQ3_XS": 3.3,
    "IQ3_XXS": 3.1, "IQ2_M": 2.7, "IQ2_S": 2.5, "IQ2_XS": 2.3, "IQ2_XXS": 2.1, "TQ2_0": 2.1, "IQ1_M": 1.75,
    "TQ1_0": 1.7, "IQ1_S": 1.6,
}  # fmt: skip
"""Approximate bits per weight in the file, by llama.cpp's names of quantization mixes. `WIDENED_BITS` has the formats
that quire converts to 8 bits when it loads them."""
WIDENED_TO_BITS = 8.5
SAFETENSORS = "safetensors"
OTHER_FILE_PATTERNS = ("*.json", "*.jinja", "tokenizer.model")
"""Patterns of the other files that a safetensors variant needs."""
LABEL = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:[IT]?Q\d(?:_[A-Z0-9]+)*|BF16|F16|F32|FP16|FP32|MXFP4(?:_MOE)?))$", re.IGNORECASE
)
ALIASES = {"FP16": "F16", "FP32": "F32", "MXFP4_MOE": "MXFP4", "Q2_K_L": "Q2_K", "Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M",
        "Q5_K": "Q5_K_M", "Q3_K_XL": "Q3_K_L", "Q4_K_L": "Q4_K_M", "Q5_K_L": "Q5_K_M", "Q6_K_L": "Q6_K",
        "Q4_K_XL": "Q4_K_M", "Q5_K_XL": "Q5_K_M", "Q6_K_XL": "Q6_K", "Q2_K_XL": "Q2_K", "Q8_K_XL": "Q8_0"}  # fmt: skip
"""Aliases of formats: name -> key of `BITS` or `WIDENED_BITS`."""
NON_MODEL_NAME = re.compile(r"mmproj|imatrix|(?:^|[-._])draft(?:[-._]|$)|vocab-only", re.IGNORECASE)
"""Names of GGUF files that are not models: vision projectors, importance matrices, drafts, vocabularies."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository, as the Hub lists it."""

    name: str
    size_bytes: int
    sha256: str | None = None
    git_sha1: str | None = None
    """Git blob id, for small files that are not in LFS."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The files of one model."""

    label: str
    """A quantization such as Q4_K_M, or "safetensors"."""
    files: tuple[HubFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def weight_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files if file.name.lower().endswith((".gguf", ".safetensors")))

    @property
    def needed_bytes(self) -> int:
        bits = WIDENED_BITS.get(self.format)
        memory_bytes = self.weight_bytes * (1.0 if bits is None else WIDENED_TO_BITS / bits)
        return int(memory_bytes * WEIGHTS_SHARE) + PROGRAM_BYTES + CONVERSATION_BYTES

    @property
    def format(self) -> str:
        """The label without the prefix "UD-" (Unsloth Dynamic), with aliases resolved."""
        name = self.label.upper().removeprefix("UD-")
        return ALIASES.get(name, name)

    @property
    def bits(self) -> float | None:
        """Bits per weight; None if quire does not support the format or the name does not show it."""
        return 16.0 if self.label == SAFETENSORS else BITS.get(self.format, WIDENED_BITS.get(self.format))

    @property
    def first_name(self) -> str:
        """The file to open."""
        return self.files[0].name


@dataclass(frozen=True, slots=True)
class Verdict:
    """A variant with the reason why it was or was not chosen."""

    variant: Variant
    reason: str
    is_selected: bool = False


def variants_of(files: Sequence[HubFile]) -> list[Variant]:
    """Return the complete variants among `files`: GGUF models by size, then safetensors."""
    gguf_files: dict[str, list[HubFile]] = {}
    for file in files:
        if file.name.lower().endswith(".gguf") and not NON_MODEL_NAME.search(file.name):
            match = PART_NAME.fullmatch(file.name)
            gguf_files.setdefault(f"{match['name']}/{match['count']}" if match else file.name, []).append(file)
    complete = [sorted(parts, key=_by_name) for parts in gguf_files.values() if _is_complete(parts)]
    variants = sorted((Variant(_label(parts[0].name), tuple(parts)) for parts in complete), key=_by_size)
    if weights := sorted((file for file in files if _is_weights(file.name)), key=_by_name):
        others = sorted((file for file in files if _is_other_file(file.name)), key=_by_name)
        variants.append(Variant(SAFETENSORS, (*weights, *others)))
    return variants


def judge_variants(variants: Sequence[Variant], memory_bytes: int) -> list[Verdict]:
    """Apply the rule of this module. Returns all variants with the reasons; the best that fits is selected."""
    best = min((variant for variant in variants if _misfit(variant, memory_bytes) is None), key=_rank, default=None)
    return [Verdict(variant, _reason(variant, best, memory_bytes), variant is best) for variant in variants]


def select(variants: Sequence[Variant], label: str, repository: str) -> Variant:
    """Return the variant with this label, in any case, with or without "UD-". Raises CheckpointError."""
    target = label.upper()
    exact = [variant for variant in variants if variant.label.upper() == target]
    matches = exact or [variant for variant in variants if variant.label.upper().removeprefix("UD-") == target]
    if not matches:
        labels = ", ".join(dict.fromkeys(variant.label for variant in variants)) or "nothing that quire runs"
        message = f"{repository} has no {label[:100]!r}; it has {labels}: choose one of them"
        raise CheckpointError(message, code="variant_not_found")
    return matches[0]


_by_name, _by_size = attrgetter("name"), attrgetter("size_bytes", "first_name")


def _label(name: str) -> str:
    """Return the quantization in the name of the file or one of its folders; otherwise the file's stem."""
    match = PART_NAME.fullmatch(name)
    stem = match["name"] if match else name[: -len(".gguf")]
    for part in reversed(stem.split("/")):
        if label := LABEL.search(part):
            return label[1].upper()
    return stem.rsplit("/", 1)[-1]


def _is_complete(files: Sequence[HubFile]) -> bool:
    """Whether every part of a split model is present exactly once."""
    match = PART_NAME.fullmatch(files[0].name)
    if match is None:
        return True
    numbers = sorted(int(part["number"]) for file in files if (part := PART_NAME.fullmatch(file.name)))
    return numbers == [*range(1, int(match["count"]) + 1)]


def _is_weights(name: str) -> bool:
    return "/" not in name and name.startswith("model") and name.endswith(".safetensors")


def _is_other_file(name: str) -> bool:
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in OTHER_FILE_PATTERNS)


def _misfit(variant: Variant, memory_bytes: int) -> str | None:
    if variant.bits is None:
        return "quire does not run this format"
    if variant.needed_bytes > memory_bytes:
        return f"needs {variant.needed_bytes / 1e9:,.1f} GB"
    return None


def _rank(variant: Variant) -> tuple[bool, bool, float, int, str]:
    bits = variant.bits or 0.0
    has_more = bits > MAX_BITS
    return (variant.label == SAFETENSORS, has_more, bits if has_more else -bits, variant.size_bytes, variant.first_name)


def _reason(variant: Variant, best: Variant | None, memory_bytes: int) -> str:
    misfit = _misfit(variant, memory_bytes)
    if misfit is not None:
        return misfit
    if variant is best:
        return "selected: the best that fits"
    if variant.label == SAFETENSORS:
        return "fits; a GGUF file is smaller"
    return "fits; more bits than needed" if (variant.bits or 0.0) > MAX_BITS else "fits; fewer bits, or larger"
