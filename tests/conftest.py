"""What holds for every test: which source it tests, and that no property is judged by a clock."""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

import quire

if "QUIRE_TESTED_FROM" in os.environ and not Path(quire.__file__).is_relative_to(os.environ["QUIRE_TESTED_FROM"]):
    # A mutation run must test the copy it was given, not the installed source.
    raise RuntimeError(f"the tests import {quire.__file__}, not the mutant in {os.environ['QUIRE_TESTED_FROM']}")

# As backends/load.py does for who has not imported torch yet; here test modules are first. Without it threads that wait
# for each other burn the processor that the other one needs, and on a busy machine a minute becomes ten.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

# A busy machine makes an example slow, or the drawing of one; neither is a mistake.
settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quire")
