"""`make proof-mlx`: models of mlx-lm over quire's blocks, on MLX's CPU build or on a Mac.

    kit      the runner's contract, how exact MLX is, and that nothing above knows a backend by its name
    parity   mlx-lm's own tokens, in plain and quantised weights; the CPU backend's tokens
    store    what a step allocates: nothing that grows with the pool, nothing for a found prefix
    served   behind the real server: without torch, and with workers that are killed

Models: `make model`. The section "beside the CPU backend" needs the kernels, and the extra torch for making models.
"""

import sys

from proofs.framework.proof import run
from proofs.mlx import kit, parity, served, store

PATHS = ("src/quire/backends/mlx", "src/quire/backends/host", "src/quire/core")

if __name__ == "__main__":
    sys.exit(run("mlx", kit, parity, store, served, paths=PATHS))
