"""The KV memory: blocks, their holders, and the tree of cached prefixes."""
