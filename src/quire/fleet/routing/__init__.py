"""Which member gets a request. Pure: no clock, no randomness, no sockets."""
