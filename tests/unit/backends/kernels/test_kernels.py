"""Each native kernel against plain float64, and against itself in other company: a row's bits are its own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.backends.cpu.measured_roof import read_sum
from quire.backends.cpu.tiles import StepTiles
from quire.backends.kernels import extension, sampling
from quire.backends.kernels.threads import num_threads, use_threads
from quire.errors import InvariantError
from tests.support.changed import changed
from tests.support.core.attention_world import NAN, World, close
from tests.support.errors import raises_code
from tests.support.machine import kernels
from tests.support.machine.kernels import rotate

pytestmark = pytest.mark.skipif(not extension.availability().is_available, reason=extension.availability().reason)

ROOT = Path(__file__).parents[4]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = num_threads()
    use_threads(request.param)
    yield request.param
    use_threads(before)


@pytest.mark.parametrize(
    "make",
    [
        lambda: World(1, 1, 32, 32, 16),
        lambda: World(6, 2, 40, 40, 16),
        lambda: World(8, 2, 64, 64, 32),
        lambda: World(16, 2, 80, 80, 32),
        lambda: World(3, 3, 96, 96, 64),
        lambda: World(8, 1, 128, 128, 32),
        lambda: World(4, 4, 256, 256, 16),
        lambda: World(9, 3, 128, 64, 64, window=70),
        lambda: World(6, 2, 64, 72, 32, window=5, softcap=30.0),
        lambda: World(7, 1, 48, 56, 16, softcap=8.0),
        lambda: World(8, 2, 64, 64, 32, dtype=torch.bfloat16),
        lambda: World(6, 2, 40, 104, 16, window=33, dtype=torch.bfloat16),
        lambda: World(8, 2, 64, 64, 32, dtype=torch.int8),
        lambda: World(6, 2, 40, 104, 16, window=33, softcap=9.0, dtype=torch.int8),
    ],
)
def test_attention_is_attention(make: Callable[[], World], threads: int) -> None:
    del threads
    world = make()
    for past, rows in (
        (0, 1),
        (world.block_size - 1, 1),
        (0, 37),
        (world.block_size + 3, 9),
        (130, 1),
        (77, 5),
        (0, 2),
    ):
        world.add(past, rows)
    out = world.run(world.items, world.queries, padding=3)
    assert close(out[:-3], world.reference())
    assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))


@pytest.mark.parametrize("rows", range(1, 71, 3))
def test_attention_of_any_number_of_rows(rows: int) -> None:
    world = World(num_heads=3, num_kv_heads=1, block_size=16, key_size=40, value_size=40, seed=rows)
    world.add(rows % 7 * 5, rows)
    assert close(world.run_all(), world.reference())


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_row_is_the_same_alone_in_chunks_and_token_by_token(
    window: int | None, dtype: torch.dtype, threads: int
) -> None:
    del threads
    world = World(window=window, dtype=dtype, block_size=16, key_size=72, value_size=72)
    item, queries = world.add(21, 53), world.queries[0]
    for past in (3, 40, 100):
        world.add(past, 1)
    whole = world.run_all()[:53]
    for sizes in ([53], [1] * 53, [7] * 7 + [4], [32, 1, 20], [2, 51]):
        parts, first = [], 0
        for size in sizes:
            piece = changed(item, token_ids=(0,) * size, first_position=21 + first)
            parts.append(world.run([piece], [queries[first : first + size]]))
            first += size
        assert torch.equal(torch.cat(parts), whole), sizes


def test_a_row_is_the_same_in_other_physical_blocks() -> None:
    world = World()
    item = world.add(100, 9)
    whole = world.run_all()
    moved = changed(item, block_ids=tuple(world.free.pop() for _ in item.block_ids))
    for src, dst in zip(item.block_ids, moved.block_ids, strict=True):
        world.keys[dst], world.values[dst] = world.keys[src], world.values[src]
        world.keys[src], world.values[src] = NAN, NAN
    assert torch.equal(world.run([moved], world.queries), whole)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("num_sequences", [2, 5, 17, 40])
def test_sequences_that_share_blocks_are_as_if_alone(num_sequences: int, window: int | None, threads: int) -> None:
    del threads
    world = World(block_size=16, num_blocks=400, window=window)
    trunk = [world.free.pop() for _ in range(6)]
    world.write(trunk, 0, 96)
    for at in range(num_sequences):
        world.add(world.random.randrange(100, 160), 1, shared=trunk[: 6 - at % 3])
    world.add(0, 20)
    together = world.run_all()
    assert close(together, world.reference())
    alone = [world.run([item], [rows]) for item, rows in zip(world.items, world.queries, strict=True)]
    assert torch.equal(torch.cat(alone), together)
    order = list(range(len(world.items)))
    world.random.shuffle(order)
    shuffled = world.run([world.items[at] for at in order], [world.queries[at] for at in order])
    assert torch.equal(shuffled, torch.cat([alone[at] for at in order]))


def test_one_and_two_threads_give_the_same_bits() -> None:
    world = World(block_size=16)
    for past, rows in ((0, 40), (90, 1), (33, 1), (5, 17)):
        world.add(past, rows)
    before = num_threads()
    outs = []
    for count in (1, 2):
        use_threads(count)
        outs.append(world.run_all())
    use_threads(before)
    assert torch.equal(*outs)


def test_a_prefix_is_shared_in_tiles() -> None:
    world = World(block_size=16)
    trunk = [world.free.pop() for _ in range(4)]
    world.write(trunk, 0, 64)
    for at in range(16):
        world.add(70, 1, shared=trunk if at % 2 else ())
    tiles = StepTiles(world.items, 16, world.group).rows_of_tiles
    assert sorted(row for tile in tiles for row in tile) == list(range(16))
    assert sorted(len(tile) for tile in tiles) == [1] * 8 + [4, 4]
    assert all(row % 2 for tile in tiles if len(tile) > 1 for row in tile)


def test_a_nan_stays_in_its_own_row() -> None:
    world = World(block_size=16)
    for past in (20, 30, 40):
        world.add(past, 1)
    clean = world.run_all()
    world.queries[1][0, 0] = NAN
    out = world.run_all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    assert torch.isnan(out[1, 0]).all()
    assert torch.equal(out[1, 1:], clean[1, 1:])


def test_exp_is_right_and_the_same_in_every_lane() -> None:
    numbers = torch.cat([torch.linspace(-87.3, 0, 400_001), -torch.logspace(-30, 1, 10_001)])
    exact = torch.exp(numbers.double())
    ulp = 2.0 ** (torch.floor(torch.log2(exact)) - 23)
    assert ((kernels.exp(numbers).double() - exact).abs() / ulp).max() < 2
    edges = torch.tensor([0.0, -0.0, -float("inf"), -88.0, -1e30])
    assert kernels.exp(edges).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert torch.isnan(kernels.exp(torch.tensor([NAN]))).all()
    some = numbers[1000:1067]
    single = torch.cat([kernels.exp(some[at : at + 1].clone()) for at in range(len(some))])
    assert torch.equal(kernels.exp(some.clone()), single)


@pytest.mark.parametrize("size", [8, 33, 64, 576, 1537])
@pytest.mark.parametrize("rows", [1, 2, 7, 70])
def test_norm(rows: int, size: int, threads: int) -> None:
    del threads
    added, residual, weight = torch.randn(rows, size), torch.randn(rows, size), torch.randn(size)
    for addend in (None, added):
        total = residual if addend is None else residual + addend
        wide = total.double()
        expected = weight.double() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        kept = residual.clone()
        out = kernels.add_rms_norm(addend, kept, weight, torch.empty_like(kept), 1e-5)
        assert torch.equal(kept, total)
        assert close(out, expected)
        last = None if addend is None else addend[-1:]
        alone = kernels.add_rms_norm(last, residual[-1:].clone(), weight, torch.empty(1, size), 1e-5)
        assert torch.equal(out[-1:], alone)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size", "value_size"), [(1, 32, 32), (7, 40, 40), (50, 128, 64), (4, 256, 256)])
def test_rope_and_write(
    rows: int, size: int, value_size: int, dtype: torch.dtype, has_norm: bool, threads: int
) -> None:
    del threads
    heads, kv_heads, slots_of_block = 6, 2, 16
    qkv = torch.randn(rows, (heads + kv_heads) * size + kv_heads * value_size)
    angle = torch.randn(rows, 1, size)
    norms = kernels.HeadNormWeights(torch.randn(size), torch.randn(size), 1e-6) if has_norm else None
    blocks = 1 + torch.randperm(60)[:rows]
    slots = torch.randint(slots_of_block, (rows,))
    keys = torch.full((64, kv_heads, size, slots_of_block), NAN, dtype=dtype)
    values = torch.full((64, kv_heads, slots_of_block, value_size), NAN, dtype=dtype)
    blocks[rows // 2] = 0 if rows > 1 else blocks[0]
    places = kernels.Places(angle.cos(), angle.sin(), blocks, slots)
    queries = kernels.rope_write(qkv, places, norms, (keys, values), torch.empty(rows, heads, size))

    joined = qkv[:, : (heads + kv_heads) * size].view(rows, -1, size)
    asked, kept = torch.split(joined, [heads, kv_heads], dim=1)
    if norms is not None:
        asked, kept = _normed(asked, norms.query), _normed(kept, norms.key)
    assert close(queries, rotate(asked, angle.cos(), angle.sin()))
    turned = rotate(kept, angle.cos(), angle.sin())
    given = qkv[:, (heads + kv_heads) * size :].view(rows, kv_heads, value_size)
    real = blocks > 0
    written = keys[blocks[real], :, :, slots[real]]
    if dtype == torch.float32:
        assert close(written, turned[real])
    else:
        assert torch.allclose(written.float(), turned[real], rtol=2**-7, atol=1e-5)
    assert torch.equal(values[blocks[real], :, slots[real]], given[real].to(dtype))
    assert torch.isnan(keys[0]).all()
    assert int((~torch.isnan(keys)).sum()) == int(real.sum()) * kv_heads * size


def test_codes_are_the_nearest_and_their_scale_is_the_largest_over_127() -> None:
    rows, size, value_size = 20, 40, 72
    qkv, angle = torch.randn(rows, 2 * size + value_size), torch.zeros(rows, size)
    qkv[3, size : 2 * size], qkv[4, 2 * size :] = 0.0, 0.0
    qkv[5, size], qkv[6, -1] = NAN, float("inf")
    world = World(1, 1, size, value_size, 16, dtype=torch.int8, num_blocks=3)
    blocks, slots = torch.arange(rows) // 16 + 1, torch.arange(rows) % 16
    places = kernels.Places(angle.cos(), angle.sin(), blocks, slots)
    kernels.rope_write(qkv, places, None, (world.keys, world.values), torch.empty(rows, 1, size))
    keys, values = world.coded_keys, world.coded_values
    written = (
        (keys[0][blocks, 0, :, slots], keys[1][blocks, 0, slots], qkv[:, size : 2 * size], 5),
        (values[0][blocks, 0, slots], values[1][blocks, 0, slots], qkv[:, 2 * size :], 6),
    )
    for codes, scales, numbers, broken in written:
        assert torch.isnan(scales[broken])
        whole = torch.arange(rows) != broken
        assert torch.equal(scales[whole], numbers[whole].abs().amax(-1) / 127)
        error = (codes.double() * scales[:, None].double() - numbers.double()).abs()[whole]
        assert (error <= 0.5001 * scales[whole, None]).all()
        assert codes[whole].abs().amax(-1).eq(127).sum() == int((scales[whole] > 0).sum())
    assert torch.isnan(keys[1][0]).all()
    assert torch.isnan(values[1][0]).all()


def test_rope_rows_are_their_own_and_bfloat16_rounds_like_torch() -> None:
    rows, size = 40, 64
    qkv, angle = torch.randn(rows, 4 * size), torch.randn(rows, size)
    blocks, slots = torch.arange(rows) // 16 + 1, torch.arange(rows) % 16

    def run(span: slice, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = torch.zeros(4, 1, size, 16, dtype=dtype), torch.zeros(4, 1, 16, size, dtype=dtype)
        places = kernels.Places(angle[span].cos(), angle[span].sin(), blocks[span].clone(), slots[span].clone())
        queries = torch.empty(len(qkv[span]), 2, size)
        kernels.rope_write(qkv[span], places, None, (keys, values), queries)
        return queries, keys

    whole, keys = run(slice(None), torch.float32)
    for at in (0, 13, 39):
        assert torch.equal(run(slice(at, at + 1), torch.float32)[0], whole[at : at + 1])
    assert torch.equal(run(slice(None), torch.bfloat16)[1], keys.to(torch.bfloat16))


@pytest.mark.parametrize("size", [1, 15, 16, 1536, 3001])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_silu(rows: int, size: int, threads: int) -> None:
    del threads
    both = 10 * torch.randn(rows, 2 * size)
    gate, up = both.double().chunk(2, dim=-1)
    out = kernels.gate_mul(both, torch.empty(rows, size))
    assert torch.allclose(out.double(), torch.nn.functional.silu(gate) * up, rtol=1e-6, atol=1e-30)
    assert torch.equal(kernels.gate_mul(both[-1:].clone(), torch.empty(1, size)), out[-1:])
    extremes = torch.tensor([[-1e30, 1e30, -100.0, 100.0, 1.0, 1.0, 1.0, 1.0]])
    assert kernels.gate_mul(extremes, torch.empty(1, 4)).tolist() == [[0.0, torch.tensor(1e30).item(), 0.0, 100.0]]


@pytest.mark.parametrize("size", [1, 15, 100, 49152])
def test_argmax(size: int, threads: int) -> None:
    del threads
    logits = torch.randint(-5, 5, (9, size)).float()
    indices, is_finite = sampling.argmax(logits.numpy())
    assert indices.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert is_finite.all()
    logits[2, size // 2], logits[4, -1], logits[5] = NAN, float("inf"), NAN
    logits[6, 0] = -float("inf")
    indices, is_finite = sampling.argmax(logits.numpy())
    assert is_finite.tolist() == [True, True, False, True, False, False, False, True, True]
    assert indices[4:6].tolist() == [size - 1, 0]


def test_read_sum() -> None:
    assert read_sum(np.ones(1_000_003, np.float32)) == 1_000_003


def test_one_openmp_runtime_is_mapped() -> None:
    assert len(extension.openmp_runtimes()) == 1


def test_what_does_not_fit_is_refused() -> None:
    world = World()
    item = world.add(40, 2)
    with raises_code(InvariantError, "too_few_blocks"):
        StepTiles([changed(item, block_ids=item.block_ids[:1])], 32, 3)
    with raises_code(InvariantError, "negative_block_id"):
        StepTiles([changed(item, block_ids=(-1, 1))], 32, 3)
    with raises_code(InvariantError, "step_without_items"):
        StepTiles([], 32, 3)
    with raises_code(InvariantError, "invariant_broken"):
        StepTiles([changed(item, token_ids=())], 32, 3)
    with raises_code(InvariantError, "invariant_broken"):
        sampling.argmax(np.zeros((2, 8)))  # type: ignore[arg-type]


_OTHER_BUILD = """
import json, sys, numpy as np, torch
from quire.backends.kernels import extension
from quire.backends.kernels.large_pages import Arena
from quire.backends.kernels.products import PackedProduct
from tests.support.machine import kernels
from tests.unit.backends.kernels.test_kernels import World, close
world = World(num_heads=8, num_kv_heads=2, key_size=40, value_size=72, block_size=16, window=50)
for past, rows in ((0, 30), (70, 1), (90, 3)):
    world.add(past, rows)
out = world.run_all()
alone = torch.cat([world.run([item], [rows]) for item, rows in zip(world.items, world.queries)])
torch.manual_seed(9)
weight, bias, rows = (torch.randn(*size).bfloat16().float() for size in ((97, 70), (97,), (45, 70)))
right = rows.double() @ weight.double().T + bias.double()
wrong = {}
indices = np.array([96, 0, 47, 48, 31], np.int64)
for dtype in ("float32", "bfloat16"):
    packed = PackedProduct([weight.numpy()], (97, 70), bias.numpy(), dtype, Arena())
    def product(some):
        out = torch.empty(len(some), 97)
        packed.product(some.numpy(), out.numpy())
        return out
    whole = product(rows)
    wrong[dtype] = float((whole - right).abs().max())
    if not all(torch.equal(product(rows[at : at + n]), whole[at : at + n]) for at in (0, 3) for n in range(40)):
        wrong[dtype] = 1.0
    if not np.array_equal(packed.rows(indices), weight.numpy()[indices]):
        wrong[dtype] = 2.0
numbers = -np.linspace(0, 750, 5000)
wide = np.empty_like(numbers)
extension.kernels().exp_double(numbers.ctypes.data, wide.ctypes.data, len(numbers))
print(json.dumps({"isa": extension.availability().isa, "exp_double": wide.tolist(),
                  "out": out.flatten().tolist(), "same": torch.equal(out, alone),
                  "wrong": wrong, "exp": kernels.exp(torch.linspace(-87, 0, 1000)).tolist()}))
"""


def _run_build(isa: str) -> dict[str, Any]:
    environment = {**os.environ, "QUIRE_INSTRUCTION_SET": isa, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _OTHER_BUILD], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _is_there(isa: str) -> bool:
    """Whether this processor can run that build."""
    program = "from quire.backends.kernels import extension; print(extension.availability().is_available)"
    environment = {**os.environ, "QUIRE_INSTRUCTION_SET": isa}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


def test_every_build_agrees() -> None:
    best = _run_build("")
    builds = ("avx512vnni", "avx512", "avxvnni", "avx2", "portable")
    others = [isa for isa in builds[builds.index(str(best["isa"])) :] if _is_there(isa)]
    assert best["same"] is True
    assert all(wrong < 1e-4 for wrong in best["wrong"].values())
    for isa in others:
        other = _run_build(isa)
        assert all(wrong < 1e-4 for wrong in other["wrong"].values()), isa
        assert other["isa"] == isa
        assert other["same"] is True
        assert torch.allclose(torch.tensor(best["out"]), torch.tensor(other["out"]), rtol=1e-5, atol=1e-5)
        assert best["exp"] == other["exp"]
        assert best["exp_double"] == other["exp_double"]


def test_a_build_that_is_not_there_is_refused() -> None:
    program = "from quire.backends.kernels import extension as e; a = e.availability(); print(a.is_available, a.reason)"
    environment = {**os.environ, "QUIRE_INSTRUCTION_SET": "quantum"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False expected an instruction set of this processor, ")
    assert done.stdout.rstrip().endswith("portable, got quantum")


def test_without_the_extension_the_reason_says_so() -> None:
    program = (
        "import sys; sys.modules['quire._native'] = None\n"
        "from quire.backends.kernels import extension; a = extension.availability(); print(a.is_available, a.reason)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False built without a compiler")


BUILT_TOGETHER = {
    "avx512vnni": "avx512;avx512vnni",
    "avx512": "avx512;avx512vnni",
    "avxvnni": "avx2;avxvnni",
    "avx2": "avx2",
    "neondot": "neondot",
}
"""Instruction sets that one build needs, by what a processor takes."""


@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("c++")), reason="needs CMake and a C++ compiler")
def test_the_kernels_are_clean_under_sanitizers(tmp_path: Path) -> None:
    """The plain build and what this processor takes; `make native-sanitize` has them all."""
    cmake = str(shutil.which("cmake"))
    isas = f"portable;{BUILT_TOGETHER.get(str(extension.availability().isa), 'portable')}"
    for arguments in (
        ["-S", str(ROOT / "native"), "-B", str(tmp_path), "-DQUIRE_NATIVE_TESTS=ON", f"-DQUIRE_NATIVE_ISAS={isas}"],
        ["--build", str(tmp_path), "--parallel", "2", "--target", "test_kernels"],
    ):
        subprocess.run([cmake, *arguments], check=True, capture_output=True)
    done = subprocess.run([str(tmp_path / "test_kernels")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _normed(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-6)
