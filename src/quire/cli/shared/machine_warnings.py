"""Warnings about this machine, printed before a command loads a model."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.config import ModelSettings


def machine_warnings(settings: "ModelSettings") -> Iterator[str]:
    """Yield warnings about settings that exceed this machine's memory or CPUs, and about slow kernels."""
    from quire.backends.kernels.extension import availability
    from quire.backends.load import prepare_kernels
    from quire.config.machine import limit_warnings

    yield from limit_warnings(settings.memory_bytes, settings.num_threads)
    prepare_kernels(settings)
    if availability().isa == "portable":
        yield (
            "the portable kernels are in use: they have about a tenth of the speed of those for AVX2; quire doctor "
            "shows why"
        )
