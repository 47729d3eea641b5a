"""The member: a worker process with a network address that serves gateways."""
