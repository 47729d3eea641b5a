"""One interface for packed weights. The format of a weight determines how it is packed:

F32                        kernels.products, in float32
BF16 by `--dtype bfloat16` kernels.products, in AMX tile registers, if available
all others                 panels (formats.packed_weight), in float or integer arithmetic
"""

from collections.abc import Iterator, Sequence

import numpy as np

from quire.backends.cpu.formats.packed_weight import PackedWeight, can_join
from quire.backends.cpu.formats.source import PIECE_NUMBERS, Source
from quire.backends.cpu.formats.weight_format import Arithmetic
from quire.backends.kernels.arrays import Floats
from quire.backends.kernels.large_pages import Arena
from quire.backends.kernels.products import PIECE_ROWS, WEIGHT_TYPES, PackedProduct, from_bf16
from quire.errors import CheckpointError

Reference = tuple[int, int, int, int, int, int, int, int]
"""A weight as `native/step/forward.hpp` expects it: packing, format, arithmetic, group, address, address of the bias or
0, inputs, outputs. Valid as long as the weight object exists."""
PANELS = 2
"""Packing id of panels in a Reference; the other ids are in WEIGHT_TYPES."""


class PanelLinear(PackedWeight):
    """A weight in panels, and the arithmetic of its products."""

    def __init__(self, sources: Sequence[Source], bias: Floats | None, arithmetic: Arithmetic, arena: Arena) -> None:
        super().__init__(sources, arena, bias)
        fields = (PANELS, self.format.native_id, int(arithmetic), self.group)
        self.reference: Reference = (*fields, *self.addresses, self.num_in, self.num_out)

    def parts(self, count: int) -> list[Reference]:
        """Return references to `count` equal parts of the outputs; each part consists of whole panels."""
        fields, (packed, bias) = self.reference[:4], self.addresses
        size, num_bytes = self.num_out // count, self.num_bytes // count
        return [
            (*fields, packed + index * num_bytes, bias + index * size * 4 if bias else 0, self.num_in, size)
            for index in range(count)
        ]


class PlainLinear(PackedProduct):
    """A weight in float32 or bfloat16, packed for `kernels.products`."""

    def __init__(self, sources: Sequence[Source], bias: Floats | None, dtype: str, arena: Arena) -> None:
        shape = (sum(source.num_out for source in sources), sources[0].num_in)
        super().__init__(_chunks(sources, shape, dtype), shape, bias, dtype, arena)
        fields = (WEIGHT_TYPES[dtype], 0, 0, 0)
        self.reference: Reference = (*fields, *self.addresses, self.num_in, self.num_out)


Linear = PanelLinear | PlainLinear
"""A weight ([out, in]). The bits of a row's product depend only on that row."""


class Packer:
    """Packs sources into weights, in the arithmetic that their format and the settings select."""

    def __init__(self, arithmetic: str, has_amx: bool) -> None:
        self._arithmetic = arithmetic
        self._has_amx = has_amx
        self._arena = Arena()

    def groups(self, sources: Sequence[Source]) -> list[list[Source]]:
        """Group consecutive sources that can be joined into one weight."""
        groups: list[list[Source]] = []
        for source in sources:
            if groups and self._can_join([*groups[-1], source]):
                groups[-1].append(source)
            else:
                groups.append([source])
        return groups

    def pack(self, sources: Sequence[Source], bias: Floats | None = None) -> Linear:
        """Pack these sources, stacked by outputs, into one weight."""
        if (dtype := self._plain_type(sources[0])) is not None:
            return PlainLinear(sources, bias, dtype, self._arena)
        return self._pack_panels(sources, bias)

    def _pack_panels(self, sources: Sequence[Source], bias: Floats | None) -> PanelLinear:
        weight_format = sources[0].format
        is_integer = self._arithmetic != "float" and Arithmetic.INTEGER in weight_format.arithmetics
        arithmetic = Arithmetic.INTEGER if is_integer else Arithmetic.FLOAT
        return PanelLinear(sources, bias, arithmetic, self._arena)

    def pack_each(
        self, sources: Sequence[Source], biases: Sequence[Floats | None]
    ) -> tuple[list[Linear], list[Reference]]:
        """Pack sources of one format, joined if possible; return the weights and one reference per source."""
        if any(source.format != sources[0].format for source in sources):
            names = sorted({source.format.name for source in sources})
            raise CheckpointError(
                f"expected the experts of a layer in one format, got {', '.join(names)}; choose other weights"
            )
        is_joinable = can_join([*sources, sources[0]])  # with a repeated source, the last one must be whole panels too
        if self._plain_type(sources[0]) is None and is_joinable:
            joined = None if biases[0] is None else np.concatenate([bias for bias in biases if bias is not None])
            weight = self._pack_panels(sources, joined)
            return [weight], weight.parts(len(sources))
        weights = [self.pack([source], bias) for source, bias in zip(sources, biases, strict=True)]
        return weights, [packed.reference for packed in weights]

    def _can_join(self, sources: Sequence[Source]) -> bool:
        if self._plain_type(sources[0]) is None:
            return can_join(sources)
        return all(source.format == sources[0].format for source in sources)

    def _plain_type(self, source: Source) -> str | None:
        if source.format.name == "F32":
            return "float32"
        return "bfloat16" if source.format.name == "BF16" and self._has_amx else None


def _chunks(sources: Sequence[Source], shape: tuple[int, int], dtype: str) -> Iterator[Floats]:
    """Yield the stacked rows of all sources in chunks of a multiple of PIECE_ROWS rows, except the last chunk.

    A chunk is valid until the next one is requested.
    """
    num_left, max_rows = shape[0], max(1, PIECE_NUMBERS // (shape[1] * PIECE_ROWS)) * PIECE_ROWS
    chunk = np.empty((min(num_left, max_rows), shape[1]), np.float32)
    num_filled = 0
    for source in sources:
        first = 0
        while first < source.num_out:
            count = min(source.num_out - first, len(chunk) - num_filled)
            rows = source.read(first, first + count).rows
            floats = rows.view(np.float32) if dtype == "float32" else from_bf16(rows.view(np.uint16))
            chunk[num_filled : num_filled + count] = floats
            first, num_filled = first + count, num_filled + count
            if num_filled == len(chunk):
                yield chunk
                num_left, num_filled = num_left - num_filled, 0
                chunk = chunk[: min(num_left, max_rows)]
