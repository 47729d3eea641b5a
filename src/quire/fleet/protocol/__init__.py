"""Messages between gateways and members, their keys, and validation of received messages."""
