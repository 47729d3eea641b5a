"""`make proof-mlx`: models of mlx-lm over quire's blocks, on MLX's CPU build or on a Mac.

    kit      the runner's contract, and how exact MLX computes
    parity   tokens compared with mlx-lm's, in plain and quantised weights, and with the CPU backend's
    store    allocations of a step: nothing that grows with the pool, nothing for a cached prefix
    served   behind the real server: without torch, and with workers that are killed

It needs the models of `make model`. The section "beside the CPU backend" needs the kernels, and torch to make models.
"""

import sys

from proofs.framework.proof import run
from proofs.mlx import kit, parity, served, store

PATHS = ("src/quire/backends/mlx", "src/quire/backends/host", "src/quire/core")

if __name__ == "__main__":
    sys.exit(run("mlx", kit, parity, store, served, paths=PATHS))
