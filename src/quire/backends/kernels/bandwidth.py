"""How fast this machine reads memory: a sum over more than its caches hold. What bounds one answer on a CPU."""

import ctypes
import mmap
from statistics import median
from time import perf_counter

from quire.backends.kernels.extension import available, kernels
from quire.backends.kernels.threads import num_threads

READ_BYTES = 512 << 20
ROUNDS = 5


def bandwidth_bytes_per_s() -> float | None:
    """Bytes a second, the median of a few rounds; None where there are no kernels."""
    if not available().is_available:
        return None
    with mmap.mmap(-1, READ_BYTES) as memory:
        numbers = (ctypes.c_char * READ_BYTES).from_buffer(memory)
        address = ctypes.addressof(numbers)
        ctypes.memset(address, 1, READ_BYTES)  # pages that were never written are all the same one
        taken = [_timed(address) for _ in range(ROUNDS)]
        del numbers  # the memory cannot be given back while an array points into it
    return READ_BYTES / median(taken)


def _timed(address: int) -> float:
    started_s = perf_counter()
    kernels().read_sum(address, READ_BYTES, num_threads())
    return perf_counter() - started_s
