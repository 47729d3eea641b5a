"""`quire chat`, `generate` and `explain`: one person at a terminal."""
