"""Bytes and HTTP: the protocol, bounds, bodies, events and errors as they are sent. Independent of models and keys."""
