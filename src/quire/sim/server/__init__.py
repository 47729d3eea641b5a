"""One server with the real scheduler and KV memory and a simulated device."""
