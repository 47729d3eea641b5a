"""Why a prompt was not in the cache, and what keeps a prefix from being shared."""
