"""The core seen from outside: snapshots, maps of the pool and of the tree, the invariants."""
