"""The frozen messages of the seam between the core, which decides, and a runner, which computes.

Plain data only: a plan must survive being logged, replayed and sent over a wire. Imports nothing of quire.
"""

from typing import NamedTuple


class BlockCopy(NamedTuple):
    """Copy one whole block before the step writes anything. The core plans it and never touches the data."""

    src: int
    dst: int
