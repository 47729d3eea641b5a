"""A function of single numbers gives a number the same bits wherever it stands, whoever computes it."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from hypothesis import given
from hypothesis import strategies as st

from quire.backends.torch.whole_vectors import WholeVectors

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda given: F.gelu(given, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "mish": F.mish,
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "exp2": torch.exp2,
    "power": lambda given: given.abs().pow(1.3),
    "glu": lambda given: F.glu(torch.stack([given, given.flip(0)], -1).flatten(-2).view(-1, 2), dim=-1),
    "in place": lambda given: given.clone().sigmoid_(),
}
LARGEST = 70_000
"""Numbers: torch would share them out among threads."""


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(count: int = LARGEST) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(7)) * 3


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "glu"])
@given(count=st.integers(0, 200), first=st.integers(0, 200))
def test_a_number_has_the_same_bits_in_any_company(name: str, count: int, first: int) -> None:
    function, all_numbers = FUNCTIONS[name], numbers(400)
    with WholeVectors():
        together, alone = function(all_numbers), function(all_numbers[first : first + count])
    assert torch.equal(alone, together[first : first + count])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_threads_change_no_bit_and_the_numbers_are_torch_s(name: str, threads: None) -> None:
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        with WholeVectors():
            found.append(FUNCTIONS[name](numbers()))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], FUNCTIONS[name](numbers()))


def test_without_it_torch_gives_what_is_left_over_other_bits() -> None:
    together = F.silu(numbers(400))
    assert any(not torch.equal(F.silu(numbers(400)[:count]), together[:count]) for count in range(1, 200)), (
        "torch no longer does so: the room can go"
    )


def test_functions_of_two_arrays_and_integers_pass_as_they_are() -> None:
    with WholeVectors():
        assert torch.equal(torch.pow(torch.tensor([2.0, 3.0]), torch.tensor([3.0, 2.0])), torch.tensor([8.0, 9.0]))
        assert torch.equal(torch.pow(torch.tensor([2, 3]), 2), torch.tensor([4, 9]))
