"""Bytes and HTTP: the protocol, bounds, bodies, events and errors as they are sent. Knows no model and no key."""
