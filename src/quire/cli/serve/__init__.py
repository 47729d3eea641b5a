"""`quire serve` and `quire run`: from settings to a server."""
