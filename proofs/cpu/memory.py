"""The large model's memory: nothing of it is written to disk, its weights are held once, and it answers soon.

A server of its own is started on the 8B file, whose pages are warm; what it writes is read from the system's own
account of its processes, and from the cache folder.
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

SHARE, BESIDE_BYTES = 1.15, int(0.4 * GIB)
KV_FLAGS = ("--memory", "8GiB", "--max-model-len", "256", "--max-running", "2")
"""So few keys and values that they are nothing beside the weights."""
SMALL_BYTES = 64 << 20
"""Config and tokenizer of a file are written once; weights are larger."""


@section("the large model in memory")
def large(proof: Proof) -> None:
    """From the file to the first token."""
    file = bench_model("8b")
    _warm(file)
    before, files = bytes_in(cache_folder()), _weight_files()
    began_s = time.perf_counter()
    with served(Path(sys.executable), proof.folder, *KV_FLAGS, model=file) as server:
        server.complete()
        first_s = time.perf_counter() - began_s
        held = held_bytes(server.process.pid)
    grown = bytes_in(cache_folder()) - before
    say(f"  {held / GIB:.2f} GiB held for a file of {file.stat().st_size / GIB:.2f} GiB, {grown:,} bytes in the cache")
    proof.report("cache_grown_mb", grown / 1e6, "config and tokenizer among them")
    proof.equals(
        "disk_written", sum(size for path, size in _weight_files().items() if path not in files), 0, "bytes of weights"
    )
    size = file.stat().st_size
    proof.at_most("memory_share_8b", (held - BESIDE_BYTES) / size, SHARE, "0.4 GiB beside it are taken off")
    proof.at_most("load_s_8b", first_s, 15, "to the end of an answer of eight tokens, files warm")
    proof.report("ready_s_8b", server.ready_s)


def _warm(file: Path) -> None:
    with file.open("rb") as source:
        while source.read(16 << 20):
            pass


def _weight_files() -> Mapping[Path, int]:
    """Large files in the cache folder."""
    sizes = {path: path.stat().st_size for path in cache_folder().rglob("*") if path.is_file()}
    return {path: size for path, size in sizes.items() if size > SMALL_BYTES}
