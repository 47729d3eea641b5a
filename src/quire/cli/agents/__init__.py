"""`quire launch` and `connect`: run coding agents with a server on this machine."""
