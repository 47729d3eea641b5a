"""Looking at the core from outside: snapshots, maps of the pool and of the tree, the invariants."""
