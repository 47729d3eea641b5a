"""Inspection of the core: snapshots, maps of the pool and of the prefix tree, invariant checks."""
