"""The real scheduler and the real memory with a pretended device, pretended clients and a clock moved by hand.

One seed decides everything, so a failure is replayed by one line. `shape` is the server's size, `faults` what goes
wrong, `config` what a name and a seed stand for, `ledger` what each client is owed, `simulation` the loop, `report` the
summary.
"""
