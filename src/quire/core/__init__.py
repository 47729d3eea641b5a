"""The core decides what each step computes; a runner computes it. It imports only the standard library and msgspec;
callers pass in time and randomness.

Reading order: `block_pool` (blocks and the free queue), `block_table` (one sequence's blocks), `digests` and
`prefix_tree` (block digests and the tree they form), `kv_memory` (the facade of these); `request`, `step` and
`events` (messages), `waiting_queue` (admission order), `policy` (pure decisions), `scheduler` (plan and apply);
`invariants` (consistency checks).
"""
