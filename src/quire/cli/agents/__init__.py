"""`quire launch` and `connect`: coding agents with a server of this machine."""
