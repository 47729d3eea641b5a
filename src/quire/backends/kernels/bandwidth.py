"""Memory read bandwidth, which bounds single-sequence decoding, measured on more data than caches can store."""

import ctypes
import mmap
from statistics import median
from time import perf_counter

from quire.backends.kernels.extension import available, kernels
from quire.backends.kernels.threads import num_threads

READ_BYTES = 512 << 20
ROUNDS = 5


def bandwidth_bytes_per_s() -> float | None:
    """Return bytes per second, the median of a few rounds; None if the kernels are unavailable."""
    if not available().is_available:
        return None
    with mmap.mmap(-1, READ_BYTES) as memory:
        numbers = (ctypes.c_char * READ_BYTES).from_buffer(memory)
        address = ctypes.addressof(numbers)
        ctypes.memset(address, 1, READ_BYTES)  # pages never written all map to the same physical page
        taken = [_timed(address) for _ in range(ROUNDS)]
        del numbers  # the memory cannot be unmapped while an array refers to it
    return READ_BYTES / median(taken)


def _timed(address: int) -> float:
    started_s = perf_counter()
    kernels().read_sum(address, READ_BYTES, num_threads())
    return perf_counter() - started_s
