"""`quire chat`, `generate` and `explain`: use one model from the terminal."""
