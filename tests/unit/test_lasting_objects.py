"""What lives as long as its process is not garbage."""

import gc

from quire.lasting_objects import freeze_startup_objects


def test_what_was_loaded_is_not_looked_through_for_garbage_again() -> None:
    was_frozen = gc.get_freeze_count()
    gc.unfreeze()
    try:
        freeze_startup_objects()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
        if was_frozen:
            gc.freeze()
