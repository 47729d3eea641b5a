"""The store's byte layout and packed products: the torch backend's smaller rooms."""

import pytest
import torch

from quire.backends.host.block_store import LayerShape
from quire.backends.kernels import products
from quire.backends.torch import linear
from quire.backends.torch.adapter import _any_shape
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.linear import LinearKind, choose_kind, padded
from quire.core.step import BlockCopy
from quire.errors import InvariantError
from tests.support.errors import raises_code

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
    with raises_code(InvariantError, "invariant_broken"):
        make_store().write_blocks([1], [b"abc"])


def test_copies_are_made_in_their_order() -> None:
    store = make_store()
    before = store.read_blocks([1])
    store.copy([BlockCopy(1, 2), BlockCopy(2, 3), BlockCopy(4, 1)])
    assert store.read_blocks([2]) == store.read_blocks([3]) == before
    assert store.read_blocks([1]) == store.read_blocks([4])


KINDS = [LinearKind("native", ""), LinearKind("onednn", "")]


def test_the_fastest_way_is_taken() -> None:
    assert choose_kind(torch.float32, CPU) == LinearKind("native", "weights packed once for any rows")


def test_other_types_take_the_plain_path_and_say_so() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        kind = choose_kind(dtype, CPU)
        assert not kind.is_packed
        assert "float32" in kind.reason


def test_a_missing_product_is_said_and_the_next_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "probe", lambda _dtype: "no kernels here")
    kind = choose_kind(torch.float32, CPU)
    assert (kind.name, kind.reason) == ("onednn", "no kernels here")
    monkeypatch.setattr(linear, "_probe_onednn", lambda: "oneDNN is not here")
    kind = choose_kind(torch.float32, CPU)
    assert (kind.name, kind.reason) == ("plain", "no kernels here")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("sizes", [(576, 960), (24, 40), (33, 65), (1, 1), (700, 31)])
@pytest.mark.parametrize("is_biased", [True, False])
def test_packed_products_agree_and_do_not_see_other_rows(
    kind: LinearKind, sizes: tuple[int, int], is_biased: bool
) -> None:
    torch.manual_seed(3)
    weight, bias = torch.randn(sizes[1], sizes[0]), torch.randn(sizes[1]) if is_biased else None
    product = kind.prepare(weight, bias)
    rows = torch.randn(kind.padded(700), sizes[0])
    whole = product(rows)
    assert torch.allclose(whole, torch.nn.functional.linear(rows, weight, bias), atol=1e-3)
    for count in sorted({kind.padded(n) for n in range(1, 600)}):
        assert torch.equal(product(rows[7 : 7 + count]), whole[7 : 7 + count]), count


def test_padding_is_small_and_takes_few_sizes() -> None:
    counts = [padded(n) for n in range(1, 513)]
    assert all(n <= count <= max(2, n * 1.5) for n, count in enumerate(counts, 1))
    assert len(set(counts)) < 30


def test_an_adapted_layer_takes_rows_of_any_shape_and_layout() -> None:
    torch.manual_seed(8)
    weight, values = torch.randn(40, 24), torch.randn(2, 24, 7)
    for kind in KINDS:
        forward = _any_shape(kind.prepare(weight), kind)
        for given in (values.transpose(1, 2), values[:, :, :1].transpose(1, 2), values.transpose(1, 2)[:, :0]):
            assert torch.allclose(forward(given), torch.nn.functional.linear(given, weight), atol=1e-4)
