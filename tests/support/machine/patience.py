"""How long a test waits for what must come. A machine that is busy makes a test slow, never wrong."""

PATIENCE_S = 600.0
"""For a condition that must come true: it ends as soon as it has, however little of the machine is left for it."""
