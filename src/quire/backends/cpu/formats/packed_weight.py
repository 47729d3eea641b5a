"""A weight packed once into panels (groups of 16 outputs) for native kernels and any row count; rows can be read."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.backends.cpu.formats.source import PANEL_OUTPUTS, RowPiece, Source
from quire.backends.cpu.formats.weight_format import WeightFormat
from quire.backends.kernels.arrays import Floats
from quire.backends.kernels.extension import kernels
from quire.backends.kernels.large_pages import Arena
from quire.backends.kernels.threads import num_threads
from quire.errors import CheckpointError, InvariantError


class PackedWeight:
    """A weight [out, in] with a bias. A row's product is the same in any batch and for any thread count."""

    def __init__(self, sources: Sequence[Source], arena: Arena, bias: Floats | None = None) -> None:
        """Pack tensors of one format stacked by outputs; all but the last must consist of whole panels."""
        first = sources[0]
        _check_joined(sources)
        self.format: WeightFormat = first.format
        self.num_in = first.num_in
        self.num_out = sum(source.num_out for source in sources)
        shape = (first.format.native_id, self.num_out, self.num_in, first.group)
        self._packed = arena.take(kernels().panel_bytes(*shape))
        self._bias = None if bias is None else np.ascontiguousarray(bias, dtype=np.float32)
        if self._bias is not None and self._bias.shape != (self.num_out,):
            raise InvariantError(f"expected a bias of {self.num_out} numbers, got {self._bias.shape}")
        self.num_bytes, self.group = len(self._packed), first.group
        self.addresses = self._packed.ctypes.data, 0 if self._bias is None else self._bias.ctypes.data
        """Addresses of the panels and of the bias (0: no bias)."""
        self._call_arguments = (*shape, self.addresses[0])
        self._pack(sources)

    def rows(self, indices: NDArray[np.int64]) -> Floats:
        """Return the weight rows of these outputs as float32, [index, in]."""
        indices = np.ascontiguousarray(indices, dtype=np.int64)
        # Viewed as unsigned, a negative number is large.
        if indices.ndim != 1 or (len(indices) and indices.view(np.uint64).max() >= self.num_out):
            raise InvariantError(f"expected rows between 0 and {self.num_out - 1}, got {indices}")
        out = np.empty((len(indices), self.num_in), dtype=np.float32)
        kernels().panel_unpack(
            *self._call_arguments, indices.ctypes.data, len(indices), out.ctypes.data, self.num_in, num_threads()
        )
        return out

    def _pack(self, sources: Sequence[Source]) -> None:
        panel_bytes = kernels().panel_bytes(self._call_arguments[0], PANEL_OUTPUTS, *self._call_arguments[2:4])
        first_output = 0
        for source in sources:
            for first, piece in source.pieces():
                _check_piece(source, piece)
                address = self._call_arguments[4] + (first_output + first) // PANEL_OUTPUTS * panel_bytes
                self._pack_piece(piece, address)
            first_output += source.num_out

    def _pack_piece(self, piece: RowPiece, address: int) -> None:
        rows = piece.rows if piece.rows.strides[1] == 1 else np.ascontiguousarray(piece.rows)
        scales = None if piece.scales is None else np.ascontiguousarray(piece.scales, dtype=np.float32)
        zeros = None if piece.zeros is None else np.ascontiguousarray(piece.zeros, dtype=np.uint8)
        kernels().pack_panels(
            self._call_arguments[0],
            len(rows),
            *self._call_arguments[2:4],
            rows.ctypes.data,
            rows.strides[0],
            0 if scales is None else scales.ctypes.data,
            0 if zeros is None else zeros.ctypes.data,
            address,
            num_threads(),
        )


def _check_piece(source: Source, piece: RowPiece) -> None:
    """Raise CheckpointError unless the chunk has the shape that the kernels will read."""
    num_scales = -(-source.num_in // source.group) if source.group else 0
    expected_shape = (len(piece.rows), source.format.row_bytes(source.num_in))
    extra_shapes = [array.shape for array in (piece.scales, piece.zeros) if array is not None]
    if piece.rows.shape != expected_shape or any(shape != (len(piece.rows), num_scales) for shape in extra_shapes):
        raise CheckpointError(
            f"weight of format {source.format.name} with {source.num_in} inputs: expected bytes {expected_shape}, "
            f"got {piece.rows.shape} with scales or zeros {extra_shapes}; the files belong to different models"
        )


def can_join(sources: Sequence[Source]) -> bool:
    """Whether these tensors can form one weight: one format, equal inputs, and whole panels in all but the last."""
    first = sources[0]
    are_equal = all(
        (source.format, source.num_in, source.group) == (first.format, first.num_in, first.group) for source in sources
    )
    return are_equal and all(source.num_out % PANEL_OUTPUTS == 0 for source in sources[:-1])


def _check_joined(sources: Sequence[Source]) -> None:
    if not can_join(sources):
        shapes = ", ".join(f"{source.format.name} [{source.num_out}, {source.num_in}]" for source in sources)
        raise InvariantError(
            "expected tensors of one weight to have one format, equal inputs and, but for the last, a multiple of "
            f"{PANEL_OUTPUTS} outputs, got {shapes}"
        )
