"""Which callers may send requests, how many and how large: keys, quotas, origins, admission, stored conversations."""
