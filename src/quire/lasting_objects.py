"""What lives as long as its process (libraries, models, an empty pool) is not looked through for garbage again."""

import gc


def freeze_startup_objects() -> None:
    """For servers and workers, once, when everything is loaded.

    A collection of everything takes tens of milliseconds, and comes in the middle of somebody's answer. Whoever starts
    a process like that has not looked for garbage until now: next to nothing of what is imported is any.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
