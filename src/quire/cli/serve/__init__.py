"""`quire serve` and `quire run`: start a server from settings."""
