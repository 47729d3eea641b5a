"""HTTP: the protocol, limits, request bodies, server-sent events and errors. Independent of models and keys."""
