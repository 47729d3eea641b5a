"""Fails unless the kernels of an installed quire can be used here: what a fresh wheel is asked first."""

import sys

from quire.backends.kernels.extension import availability

if __name__ == "__main__":
    found = availability()
    sys.stdout.write(f"{found.reason}\n")
    sys.exit(not found.is_available)
