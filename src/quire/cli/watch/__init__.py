"""`quire top` and `quire dashboard`: what a running server does."""
