"""Simulations: the real scheduler and KV memory with a simulated device, simulated clients and a simulated clock.

A run depends on one seed only, so one command reproduces a failure. `server/` simulates one server, `fleet/` several
members behind gateways. `planning/` finds the number of members for a trace; `replay/` re-plans a recorded trace.
"""
