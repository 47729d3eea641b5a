"""The member: serves gateways with a worker of its own."""
