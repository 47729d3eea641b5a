"""The store's byte layout, packed products, rotary positions, memory: the torch backend's smaller rooms."""

import os
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.backends import memory_plan
from quire.backends.torch import linear, native, threads
from quire.backends.torch.kv_store import KVStore, LayerShape
from quire.backends.torch.large_pages import Arena
from quire.backends.torch.linear import LinearKind, choose_kind, padded
from quire.backends.torch.models.adapter import _any_shape
from quire.backends.torch.models.decoder_config import windows_of
from quire.backends.torch.models.rope import read_rope, rope_parameters
from quire.backends.torch.threads import physical_cores
from quire.config import ModelSettings
from quire.config.machine import share_of_memory_bytes
from quire.core.step import BlockCopy
from quire.errors import CheckpointError, ConfigError
from tests.support.architectures import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE

CPU = torch.device("cpu")
SHAPES = (LayerShape(2, 4, 6), LayerShape(1, 4, 4))


def make_store() -> KVStore:
    store = KVStore(SHAPES, 5, 8, torch.float32, CPU)
    for at, tensor in enumerate((*store.keys, *store.values)):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 10_000 * at)
    return store


def test_a_block_as_bytes_is_keys_then_values_layer_after_layer() -> None:
    store = make_store()
    (data,) = store.read_blocks([3])
    expected = [store.keys[0][3], store.values[0][3], store.keys[1][3], store.values[1][3]]
    assert data == b"".join(tensor.numpy().tobytes() for tensor in expected)
    assert len(data) == store.num_block_bytes == (2 * 10 + 8) * 8 * 4


def test_keys_are_stored_transposed() -> None:
    store = make_store()
    store.write(0, torch.tensor([2]), torch.tensor([5]), torch.full((1, 2, 4), -1.0), torch.full((1, 2, 6), -2.0))
    assert bool((store.keys[0][2, :, :, 5] == -1).all())
    assert bool((store.values[0][2, :, 5, :] == -2).all())
    assert int((store.keys[0] == -1).sum()) == 8


def test_bytes_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="896 bytes, 3 given"):
        make_store().write_blocks([1], [b"abc"])


def test_copies_are_made_in_their_order() -> None:
    store = make_store()
    before = store.read_blocks([1])
    store.copy([BlockCopy(1, 2), BlockCopy(2, 3), BlockCopy(4, 1)])
    assert store.read_blocks([2]) == store.read_blocks([3]) == before
    assert store.read_blocks([1]) == store.read_blocks([4])


KINDS = [
    LinearKind("native", ""),
    LinearKind("native", "", torch.bfloat16),
    LinearKind("onednn", ""),
]


def held(kind: LinearKind, numbers: torch.Tensor) -> torch.Tensor:
    """Numbers that the kind holds exactly, so that what it rounds is not an error."""
    return numbers.to(kind.dtype).float()


def test_the_fastest_way_is_taken_for_each_type_of_weights() -> None:
    assert choose_kind(torch.float32, torch.float32, CPU) == LinearKind("native", "weights packed once for any rows")
    half = choose_kind(torch.bfloat16, torch.float32, CPU)
    assert (half.name, half.dtype, half.row_dtype) == ("native", torch.bfloat16, torch.float32)


def test_other_rows_take_the_plain_path_and_say_so() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        kind = choose_kind(dtype, dtype, CPU)
        assert not kind.is_packed
        assert kind.row_dtype == dtype
        assert "float32" in kind.reason
    assert choose_kind(torch.float16, torch.float32, CPU).name == "plain"


def test_a_missing_product_is_said_and_the_next_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_probe_native", lambda _dtype: "no kernels here")
    kind = choose_kind(torch.float32, torch.float32, CPU)
    assert (kind.name, kind.reason) == ("onednn", "no kernels here")
    assert choose_kind(torch.bfloat16, torch.float32, CPU).name == "plain"
    monkeypatch.setattr(linear, "_probe_onednn", lambda: "oneDNN is not here")
    kind = choose_kind(torch.float32, torch.float32, CPU)
    assert (kind.name, kind.reason) == ("plain", "no kernels here")


@pytest.mark.parametrize("wrong", ["numbers", "company", "operator"])
def test_a_probe_finds_what_is_wrong(wrong: str) -> None:
    def prepare(weight: torch.Tensor) -> linear.PackedLinear:
        def product(rows: torch.Tensor) -> torch.Tensor:
            if wrong == "operator":
                raise RuntimeError
            out = torch.nn.functional.linear(rows, weight)
            return out * 1.01 if wrong == "numbers" else out + len(rows) * 1e-7

        return product

    complaint = linear._probed("theirs", prepare, (2, 4))
    assert complaint is not None
    assert {"numbers": "disagrees", "company": "row-invariant", "operator": "RuntimeError"}[wrong] in complaint


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name} {kind.dtype}")
@pytest.mark.parametrize("sizes", [(576, 960), (1536, 576), (24, 40), (33, 65), (1, 1), (700, 31)])
@pytest.mark.parametrize("is_biased", [True, False])
def test_packed_products_agree_and_do_not_see_other_rows(
    kind: LinearKind, sizes: tuple[int, int], is_biased: bool
) -> None:
    torch.manual_seed(3)
    weight, bias = held(kind, torch.randn(sizes[1], sizes[0])), torch.randn(sizes[1]) if is_biased else None
    product = kind.prepare(weight, bias)
    rows = held(kind, torch.randn(kind.padded(700), sizes[0]))
    whole = product(rows)
    assert torch.allclose(whole, torch.nn.functional.linear(rows, weight, bias), atol=1e-3)
    for count in sorted({kind.padded(n) for n in range(1, 600)}):
        assert torch.equal(product(rows[7 : 7 + count]), whole[7 : 7 + count]), count


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: f"{kind.dtype}")
def test_native_products_have_the_same_bits_with_any_number_of_threads(kind: LinearKind) -> None:
    torch.manual_seed(4)
    product, rows, whole = kind.prepare(torch.randn(960, 576)), torch.randn(300, 576), []
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3, 7):
            torch.set_num_threads(num_threads)
            whole.append(product(rows))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, whole[0]) for one in whole)


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: f"{kind.dtype}")
def test_a_row_that_is_not_finite_leaves_its_neighbours_alone(kind: LinearKind) -> None:
    torch.manual_seed(5)
    product, rows = kind.prepare(torch.randn(50, 64)), torch.randn(37, 64)
    whole = product(rows)
    rows[3, 5], rows[20, 0] = float("nan"), float("inf")
    others = [at for at in range(37) if at not in (3, 20)]
    assert torch.equal(product(rows)[others], whole[others])
    assert not product(rows)[3].isfinite().any()


def test_native_products_take_rows_that_lie_apart_and_refuse_others() -> None:
    torch.manual_seed(6)
    product, wide = KINDS[0].prepare(torch.randn(50, 64)), torch.randn(20, 100)
    assert torch.equal(product(wide[:, 3:67]), product(wide[:, 3:67].contiguous()))
    for rows in (wide, wide[:, :64].double(), wide[:64].T, wide[0]):
        with pytest.raises(ValueError, match="64 contiguous numbers"):
            product(rows)
    with pytest.raises(TypeError, match="float16"):
        native.PackedProduct(torch.randn(4, 4), None, torch.float16, Arena())


def test_a_shelf_hands_out_lines_that_do_not_overlap() -> None:
    arena = Arena()
    pieces = [arena.take(size) for size in (1, 64, 100, Arena.BOARD_BYTES + 1, 7)]
    spans = sorted((piece.data_ptr(), piece.data_ptr() + len(piece)) for piece in pieces)
    assert all(first % 64 == 0 for first, _ in spans)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name} {kind.dtype}")
def test_slabs_cover_all_rows_and_change_nothing(kind: LinearKind) -> None:
    weight, rows = torch.randn(40, 24), torch.randn(kind.padded(700), 24)
    product, row_chunks = kind.prepare(weight), kind.row_chunks(kind.padded(700))
    assert torch.equal(torch.cat([product(rows[chunk]) for chunk in row_chunks]), product(rows))
    assert len(row_chunks) == (1 if kind.name == "onednn" else 3)


def test_padding_is_small_and_takes_few_sizes() -> None:
    counts = [padded(n) for n in range(1, 513)]
    assert all(n <= count <= max(2, n * 1.5) for n, count in enumerate(counts, 1))
    assert len(set(counts)) < 30


ROPES = [
    LINEAR_ROPE,
    LLAMA3_ROPE,
    YARN_ROPE,
    {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.4},
    {**YARN_ROPE, "attention_factor": 1.5, "beta_fast": 20, "truncate": False},
]


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    make: Any = CONFIG_MAPPING["llama"]
    config = make(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=4096, rope_parameters=rope
    )
    expected, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, CPU)
    made = read_rope({"rope_parameters": rope}, 16)
    assert torch.allclose(made.frequencies, expected, rtol=1e-6)
    assert made.scaling == pytest.approx(scaling)


@pytest.mark.parametrize("head_size", [40, 64, 72, 128])
def test_the_angles_of_a_position_depend_on_nothing_else(head_size: int) -> None:
    rope, positions, before = read_rope({}, head_size), torch.randint(0, 9_000, (1_500,)), torch.get_num_threads()
    whole = rope.angles(positions)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for first, end in ((0, 1), (7, 9), (100, 613), (0, 1_500)):
                part = rope.angles(positions[first:end])
                assert all(torch.equal(one, other[first:end]) for one, other in zip(part, whole, strict=True))
    finally:
        torch.set_num_threads(before)


def test_old_configs_spell_rope_otherwise() -> None:
    old = {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}}
    assert torch.equal(read_rope(old, 8).frequencies, read_rope(new, 8).frequencies)
    assert rope_parameters({})["rope_type"] == "default"


@pytest.mark.parametrize("rope", [
    {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "longrope"}, {"rope_type": "linear"},
    {"rope_type": "linear", "factor": 0.0}, {"rope_type": "yarn", "factor": "x"}, {"rope_theta": "x"},
])  # fmt: skip
def test_positions_that_cannot_be_cached_or_read_are_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="RoPE"):
        read_rope({"rope_parameters": rope}, 16)


def test_windows_come_from_layer_kinds_or_from_older_words() -> None:
    kinds = ["full_attention", "sliding_attention"]
    assert windows_of({"sliding_window": 7, "layer_types": kinds}, 2) == (None, 7)
    assert windows_of({"sliding_window": 7, "model_type": "mistral"}, 2) == (7, 7)
    assert windows_of({"sliding_window": 7, "model_type": "qwen2"}, 2) == (None, None)
    older = {"sliding_window": 7, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}
    assert windows_of(older, 3) == (None, 7, 7)
    assert windows_of({}, 2) == (None, None)


@pytest.mark.parametrize("fields", [
    {"layer_types": ["linear_attention"]}, {"layer_types": []}, {"layer_types": "full"}, {"sliding_window": 0},
    {"sliding_window": "many"}, {"layer_types": [3]},
])  # fmt: skip
def test_layers_that_cannot_share_a_prefix_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        windows_of(fields, 1)


def decide(budget_bytes: int, **settings: Any) -> memory_plan.MemoryPlan:
    return memory_plan.decide(ModelSettings(**settings), budget_bytes, 1 << 30, 100 << 20, 1 << 20, 8192)


def test_the_pool_is_what_the_budget_leaves() -> None:
    plan = decide(2 << 30)
    rest = (2 << 30) * 0.98 - memory_plan.MARGIN_BYTES - (1 << 30) - (100 << 20)
    assert plan.num_blocks == int(rest // (1 << 20)) - 1
    assert plan.max_sequence_tokens == 8192


def test_a_pool_is_no_larger_than_all_who_run_could_use() -> None:
    assert decide(100 << 30, max_sequence_tokens=64, max_running=3).num_blocks == 6


def test_a_small_pool_shortens_the_longest_sequence() -> None:
    plan = decide((1 << 30) + (300 << 20))
    assert plan.max_sequence_tokens == plan.num_blocks * 32 < 8192


def test_the_line_says_what_fits() -> None:
    line = decide(2 << 30).line
    assert "2.00 GiB" in line
    assert "27,200 tokens: 3 sequences of 8,192 or 64 of 425" in line


def test_a_budget_that_cannot_be_met_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"1\.10 GiB in all, 1\.00 GiB given; raise it to"):
        decide(1 << 30)
    with pytest.raises(ConfigError, match="the memory budget must hold the model"):
        memory_plan.check_weights_fit(1 << 20, 1 << 30, 0, 0)


def test_half_of_what_is_free_is_the_default() -> None:
    half = share_of_memory_bytes(0.5)
    assert 0.8 * half < memory_plan.budget(ModelSettings()) < 1.25 * half


def test_a_physical_core_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    monkeypatch.setattr(threads, "_siblings", lambda cpu: f"{cpu % 2},{cpu % 2 + 2}")
    assert physical_cores() == 2
    monkeypatch.setattr(threads, "_siblings", str)
    assert physical_cores() == 4


@pytest.mark.parametrize("settings", [
    {"block_size": 0}, {"memory_bytes": 0}, {"max_step_tokens": 64}, {"dtype": "int4"}, {"num_threads": -1},
])  # fmt: skip
def test_settings_that_break_a_rule_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ModelSettings(**settings)


def test_an_adapted_layer_takes_rows_of_any_shape_and_layout() -> None:
    torch.manual_seed(8)
    weight, values = torch.randn(40, 24), torch.randn(2, 24, 7)
    for kind in KINDS[::2]:
        forward = _any_shape(kind.prepare(weight), kind)
        for given in (values.transpose(1, 2), values[:, :, :1].transpose(1, 2), values.transpose(1, 2)[:, :0]):
            assert torch.allclose(forward(given), torch.nn.functional.linear(given, weight), atol=1e-4)
