"""Messages between gateways and members, keys, and validation of what was received."""
