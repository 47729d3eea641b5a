"""Which member gets a request. Pure: no clock, no dice, no sockets."""
