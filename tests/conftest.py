"""A mutation run must test the copy it was given, not the installed source."""

import os

import quire

if "QUIRE_TESTED_FROM" in os.environ and not quire.__file__.startswith(os.environ["QUIRE_TESTED_FROM"]):
    raise RuntimeError(f"the tests import {quire.__file__}, not the mutant in {os.environ['QUIRE_TESTED_FROM']}")
