"""Measures the memory read bandwidth, which limits decoding of a single sequence, on more data than fits in caches."""

import ctypes
import mmap
from statistics import median
from time import perf_counter

from quire.backends.kernels.extension import availability, kernels
from quire.backends.kernels.threads import num_threads

READ_BYTES = 512 << 20
ROUNDS = 5


def bandwidth_bytes_per_s() -> float | None:
    """Return the median bandwidth of a few rounds; None if the kernels are unavailable."""
    if not availability().is_available:
        return None
    with mmap.mmap(-1, READ_BYTES) as memory:
        buffer = (ctypes.c_char * READ_BYTES).from_buffer(memory)
        address = ctypes.addressof(buffer)
        ctypes.memset(address, 1, READ_BYTES)  # pages never written all map to the same physical page
        durations_s = [_read_duration_s(address) for _ in range(ROUNDS)]
        del buffer  # the memory cannot be unmapped while an array refers to it
    return READ_BYTES / median(durations_s)


def _read_duration_s(address: int) -> float:
    started_s = perf_counter()
    kernels().read_sum(address, READ_BYTES, num_threads())
    return perf_counter() - started_s
