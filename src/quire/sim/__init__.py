"""The real scheduler and the real memory with a simulated device, simulated clients and a simulated clock.

One seed decides everything, so a failure is replayed by one line. `server/` is one server, `fleet/` several behind
gateways, `planning/` how many of them a trace needs, `replay/` a recorded trace planned again.
"""
