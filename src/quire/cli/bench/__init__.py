"""`quire bench`: measure a server or this engine."""
