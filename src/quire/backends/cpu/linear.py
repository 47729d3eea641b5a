"""A packed weight as the rest of the backend sees it, whatever packs it for the format it is in.

F32                        kernels.products, in float32
BF16 by `--dtype bfloat16` the same, in tile registers, where there are any
all others                 panels (formats.packed_weight), in one of two arithmetics
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.formats import Arithmetic, PackedWeight, Source
from quire.backends.cpu.formats.packed_weight import can_join
from quire.backends.cpu.formats.source import PIECE_NUMBERS
from quire.backends.kernels.arrays import Floats
from quire.backends.kernels.large_pages import Arena
from quire.backends.kernels.products import PIECE_ROWS, WEIGHT_TYPES, PackedProduct, widened_bf16
from quire.backends.kernels.threads import num_threads
from quire.errors import CheckpointError

Reference = tuple[int, int, int, int, int, int, int, int]
"""As `native/step/forward.hpp` wants a weight: packing, format, arithmetic, group, address, address of the bias or 0,
inputs, outputs. It lives as long as the weight."""
PANELS = 2
"""Of packings; the others are WEIGHT_TYPES."""


class HeldRows(Protocol):
    """A matrix whose rows can be looked up: an embedding."""

    def rows(self, indices: NDArray[np.int64]) -> Floats:
        """[index, in]: rows of the weight as numbers."""


class Linear(HeldRows, Protocol):
    """A weight ([out, in]) that rows are multiplied with. The bits of a row's product depend on that row alone."""

    @property
    def reference(self) -> Reference:
        """For native code."""

    def product(self, rows: Floats, out: Floats) -> None:
        """`out` ([row, out]) = rows ([row, in]) x weight^T + bias."""


class Packer:
    """Makes weights of sources, in the arithmetic they have and the settings want."""

    def __init__(self, arithmetic: str, has_amx: bool) -> None:
        self._arithmetic = arithmetic
        self._has_tiles = has_amx
        self._arena = Arena()

    def groups(self, sources: Sequence[Source]) -> list[list[Source]]:
        """Neighbours that can be one weight together."""
        groups: list[list[Source]] = []
        for source in sources:
            if groups and self._can_join([*groups[-1], source]):
                groups[-1].append(source)
            else:
                groups.append([source])
        return groups

    def pack(self, sources: Sequence[Source], bias: Floats | None = None) -> Linear:
        """One weight of these, one below the other."""
        if (dtype := self._plain_type(sources[0])) is not None:
            return _PlainLinear(sources, bias, dtype, self._arena)
        return self._panels(sources, bias)

    def _panels(self, sources: Sequence[Source], bias: Floats | None) -> "_PanelLinear":
        made = sources[0].format
        is_integer = self._arithmetic != "float" and Arithmetic.INTEGER in made.arithmetics
        arithmetic = Arithmetic.INTEGER if is_integer else Arithmetic.FLOAT
        return _PanelLinear(PackedWeight(sources, self._arena, num_threads(), bias), arithmetic)

    def pack_each(
        self, sources: Sequence[Source], biases: Sequence[Floats | None]
    ) -> tuple[list[Linear], list[Reference]]:
        """What is held, and a reference for each source: to its outputs of one weight where they can be that."""
        if any(source.format != sources[0].format for source in sources):
            names = sorted({source.format.name for source in sources})
            raise CheckpointError(
                f"expected the experts of a layer in one format, got {', '.join(names)}; choose the model in another"
            )
        is_whole = can_join([*sources, sources[0]])  # the last one too has whole panels, as if another came behind it
        if self._plain_type(sources[0]) is None and is_whole:
            bias = None if biases[0] is None else np.concatenate([one for one in biases if one is not None])
            whole = self._panels(sources, bias)
            return [whole], whole.parts(len(sources))
        made = [self.pack([source], own) for source, own in zip(sources, biases, strict=True)]
        return made, [one.reference for one in made]

    def _can_join(self, sources: Sequence[Source]) -> bool:
        if self._plain_type(sources[0]) is None:
            return can_join(sources)
        return all(source.format == sources[0].format for source in sources)

    def _plain_type(self, source: Source) -> str | None:
        if source.format.name == "F32":
            return "float32"
        return "bfloat16" if source.format.name == "BF16" and self._has_tiles else None


class _PanelLinear:
    """Panels, and the arithmetic they are multiplied in."""

    def __init__(self, weight: PackedWeight, arithmetic: Arithmetic) -> None:
        self._weight = weight
        self._arithmetic = arithmetic

    @property
    def reference(self) -> Reference:
        weight = self._weight
        kind = (PANELS, weight.format.native_id, int(self._arithmetic), weight.group)
        return (*kind, *weight.addresses, weight.num_in, weight.num_out)

    def parts(self, count: int) -> list[Reference]:
        """References to equal parts of the outputs, each of whole panels."""
        kind, (packed, bias), num_in = self.reference[:4], self.reference[4:6], self.reference[6]
        size = self._weight.num_out // count
        num_bytes = self._weight.num_bytes // count
        return [
            (*kind, packed + at * num_bytes, bias + at * size * 4 if bias else 0, num_in, size) for at in range(count)
        ]

    def product(self, rows: Floats, out: Floats) -> None:
        self._weight.product(rows, out, self._arithmetic, num_threads())

    def rows(self, indices: NDArray[np.int64]) -> Floats:
        return self._weight.rows(indices, num_threads())


class _PlainLinear(PackedProduct):
    """Numbers of one type, packed by the kernels for it."""

    def __init__(self, sources: Sequence[Source], bias: Floats | None, dtype: str, arena: Arena) -> None:
        shape = (sum(source.num_out for source in sources), sources[0].num_in)
        super().__init__(_pieces(sources, shape, dtype), shape, bias, dtype, arena)
        kind = (WEIGHT_TYPES[dtype], 0, 0, 0)
        self.reference: Reference = (*kind, *self.addresses, self.num_in, self.num_out)


def _pieces(sources: Sequence[Source], shape: tuple[int, int], dtype: str) -> Iterator[Floats]:
    """Rows of all sources one below the other, in pieces whose rows are multiples of PIECE_ROWS, but for the last.

    Each lasts until the next is asked for.
    """
    left, num_rows = shape[0], max(1, PIECE_NUMBERS // (shape[1] * PIECE_ROWS)) * PIECE_ROWS
    piece = np.empty((min(left, num_rows), shape[1]), np.float32)
    filled = 0
    for source in sources:
        first = 0
        while first < source.num_out:
            count = min(source.num_out - first, len(piece) - filled)
            piece[filled : filled + count] = _numbers(source.read(first, first + count).rows, dtype)
            first, filled = first + count, filled + count
            if filled == len(piece):
                yield piece
                left, filled = left - filled, 0
                piece = piece[: min(left, num_rows)]


def _numbers(rows: NDArray[np.uint8], dtype: str) -> Floats:
    return rows.view(np.float32) if dtype == "float32" else widened_bf16(rows.view(np.uint16))
