"""`quire top` and `quire dashboard`: watch a running server."""
