"""Models that come when they are asked for and leave when memory is needed."""
