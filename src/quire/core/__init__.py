"""The core decides and never computes. Standard library only; time and randomness are handed in.

Reading order: `block_pool` (blocks and the free queue), `block_table` (one sequence's blocks), `digests` and
`prefix_tree` (names of blocks, and the tree they form), `kv_memory` (the one face of these); `request`, `step` and
`events` (what is sent), `waiting_queue` (what is next), `policy` (pure choices), `scheduler` (plan and apply);
`invariants` (everything that must always hold).
"""
