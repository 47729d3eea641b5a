"""`quire chat`, `generate` and `explain`: interactive use of one model."""
