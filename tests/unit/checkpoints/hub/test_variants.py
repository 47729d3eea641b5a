"""Which file of a repository fits: the stated rule, beside a search through everything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.checkpoints.hub.variants import (
    BITS,
    CONVERSATION_BYTES,
    MAX_BITS,
    PROGRAM_BYTES,
    SAFETENSORS,
    WIDENED_BITS,
    HubFile,
    Variant,
    judge_variants,
    select,
    variants_of,
)
from quire.errors import CheckpointError
from tests.support.errors import raises_code

GB = 10**9


def gguf(label: str, size: int) -> HubFile:
    return HubFile(f"model-{label}.gguf", size)


def test_a_repository_has_a_variant_for_each_file_and_one_for_all_parts_of_one() -> None:
    files = [
        gguf("Q8_0", 8),
        gguf("Q4_K_M", 4),
        HubFile("big/model-BF16-00002-of-00002.gguf", 7),
        HubFile("big/model-BF16-00001-of-00002.gguf", 9),
        HubFile("broken-Q6_K-00001-of-00002.gguf", 3),
        HubFile("mmproj-model-F16.gguf", 1),
        HubFile("README.md", 1),
    ]
    found = variants_of(files)
    assert [(one.label, one.size_bytes, one.first_name) for one in found] == [
        ("Q4_K_M", 4, "model-Q4_K_M.gguf"),
        ("Q8_0", 8, "model-Q8_0.gguf"),
        ("BF16", 16, "big/model-BF16-00001-of-00002.gguf"),
    ]


def test_safetensors_are_one_variant_with_what_is_read_beside_them() -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json", "a/b.json", "x.bin"]
    (variant,) = variants_of([HubFile(name, 10) for name in names])
    assert variant.label == SAFETENSORS
    assert [file.name for file in variant.files] == [*names[:2], "config.json"]
    assert variant.weight_bytes == 20


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Model.Q4_0.gguf", "Q4_0"),
        ("model-iq4_xs.gguf", "IQ4_XS"),
        ("Model-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("Q6_K/model.gguf", "Q6_K"),
        ("model-fp16.gguf", "FP16"),
        ("strange.gguf", "strange"),
    ],
)
def test_a_label_stands_at_the_end_of_a_name_or_of_a_folder(name: str, label: str) -> None:
    (variant,) = variants_of([HubFile(name, 1)])
    assert variant.label == label
    assert (variant.bits is None) == (label == "strange")


def test_a_variant_is_named_in_any_case_and_without_its_makers_mark() -> None:
    variants = [Variant("Q4_K_M", (gguf("a", 1),)), Variant("UD-Q2_K_XL", (gguf("b", 1),))]
    assert select(variants, "q4_k_m", "a/b") is variants[0]
    assert select(variants, "Q2_K_XL", "a/b") is variants[1]
    with raises_code(CheckpointError, "variant_not_found"):
        select(variants, "Q5_0", "a/b")


def test_what_does_not_fit_says_how_much_it_needs() -> None:
    (judged,) = judge_variants([Variant("Q8_0", (gguf("Q8_0", 10 * GB),))], 8 * GB)
    assert not judged.is_selected
    assert judged.reason == "needs 12.5 GB"


def test_each_variant_is_told_why_it_was_or_was_not_taken() -> None:
    made = [Variant(label, (gguf(label, GB),)) for label in ("Q4_0", "Q8_0", "F16", "IQ9_X", SAFETENSORS)]
    assert [one.reason for one in judge_variants(made, 8 * GB)] == [
        "fits; fewer bits, or larger",
        "selected: the best that fits",
        "fits; more bits than needed",
        "quire does not run this format",
        "fits; a GGUF file is smaller",
    ]


LABELS = st.sampled_from([*BITS, *WIDENED_BITS, "IQ9_X", SAFETENSORS])
VARIANTS = st.lists(
    st.tuples(LABELS, st.integers(1, 40 * GB)).map(lambda made: Variant(made[0], (gguf(*made),))), max_size=8
)


def held_bytes(variant: Variant) -> float:
    """Fewer bits than four become eight and a half."""
    bits = WIDENED_BITS.get(variant.label)
    return variant.weight_bytes if bits is None else variant.weight_bytes * (8.5 / bits)


@given(VARIANTS, st.integers(0, 60 * GB))
def test_the_choice_is_the_one_a_search_finds(variants: list[Variant], memory_bytes: int) -> None:
    taken = [one.variant for one in judge_variants(variants, memory_bytes) if one.is_selected]
    fitting = [
        one
        for one in variants
        if one.bits is not None and int(held_bytes(one) * 1.15) + PROGRAM_BYTES + CONVERSATION_BYTES <= memory_bytes
    ]
    files = [one for one in fitting if one.label != SAFETENSORS]
    modest = [one for one in files if (one.bits or 0) <= MAX_BITS]
    if modest:
        bits = max(one.bits or 0 for one in modest)
        best = [one for one in modest if one.bits == bits]
    elif files:
        bits = min(one.bits or 0 for one in files)
        best = [one for one in files if one.bits == bits]
    else:
        best = fitting
    smallest = [one for one in best if one.size_bytes == min(other.size_bytes for other in best)]
    first = [one for one in smallest if one.first_name == min(other.first_name for other in smallest)]
    assert taken == first[:1]
