"""Memory of the 8B model: no weights are written to disk, memory has only one copy, and the first answer comes soon.

A server is started with the 8B file, which is in the page cache. Its memory is read from /proc, and the files that it
writes are found in the cache folder.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.bench_models import bench_model
from benchmarks.record import say
from proofs.cpu.install import GIB, bytes_in, held_bytes, served
from proofs.framework.proof import Proof, section
from quire.checkpoints import cache_folder

MAX_RATIO, OVERHEAD_BYTES = 1.15, int(0.4 * GIB)  # of weights to file size; of everything else
KV_FLAGS = ("--memory", "8GiB", "--max-model-len", "256", "--max-running", "2")
"""A context so short that the KV cache is negligible beside the weights."""
SMALL_BYTES = 64 << 20
"""The server writes config and tokenizer of a file, which are smaller than this; weights are larger."""


@section("the large model in memory")
def large(proof: Proof) -> None:
    """Memory, written bytes, and time to the first answer."""
    file = bench_model("8b")
    _warm(file)
    before, old_files = bytes_in(cache_folder()), _weight_files()
    start_s = time.perf_counter()
    with served(Path(sys.executable), proof.folder, *KV_FLAGS, model=file) as server:
        server.complete()
        first_s = time.perf_counter() - start_s
        memory_bytes = held_bytes(server.process.pid)
    written, size = bytes_in(cache_folder()) - before, file.stat().st_size
    say(f"  {memory_bytes / GIB:.2f} GiB of memory for a file of {size / GIB:.2f} GiB, {written:,} bytes in the cache")
    proof.report("cache_grown_mb", written / 1e6, "including config and tokenizer")
    new_sizes = [num_bytes for path, num_bytes in _weight_files().items() if path not in old_files]
    proof.equals("disk_written", sum(new_sizes), 0, "bytes of weights")
    proof.at_most("memory_share_8b", (memory_bytes - OVERHEAD_BYTES) / size, MAX_RATIO, "without 0.4 GiB of overhead")
    proof.at_most("load_s_8b", first_s, 15, "until the end of an answer of eight tokens, file in the page cache")
    proof.report("ready_s_8b", server.ready_s)


def _warm(file: Path) -> None:
    with file.open("rb") as source:
        while source.read(16 << 20):
            pass


def _weight_files() -> Mapping[Path, int]:
    """Return sizes of large files in the cache folder."""
    sizes = {path: path.stat().st_size for path in cache_folder().rglob("*") if path.is_file()}
    return {path: size for path, size in sizes.items() if size > SMALL_BYTES}
