"""A recorded trace through the real scheduler again."""
