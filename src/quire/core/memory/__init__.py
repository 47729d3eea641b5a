"""The KV memory: blocks, who holds them, and the tree of cached prefixes."""
