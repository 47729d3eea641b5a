"""Models that are loaded when they are requested and unloaded when memory is needed."""
