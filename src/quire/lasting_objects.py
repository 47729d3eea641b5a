"""Exclude objects that live as long as the process (libraries, models, the empty pool) from garbage collection."""

import gc


def freeze_startup_objects() -> None:
    """Collect garbage once and freeze the rest; servers and workers call this when everything is loaded.

    A full collection takes tens of milliseconds and would happen during a response. These processes start with the
    collector disabled, because imports create almost no garbage; this call enables it.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
