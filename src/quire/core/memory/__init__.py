"""The KV memory: the block pool, block tables, and the tree of cached prefixes."""
