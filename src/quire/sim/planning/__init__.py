"""Capacity planning: the number and size of servers that a trace needs."""
