"""Helper processes with time and memory limits, for work whose cost depends on a client's input."""
