"""Cache-aware routing: choose the member for a request. Pure logic without clock, randomness or sockets."""
