"""The process that owns a model, and its supervisor: token ids only, nothing of `text/` is loaded in a worker.

`process` is the child. `handle`, `ledger` and `supervisor` are the parent's side: they replace a worker that died and
resubmit what clients are owed. `messages` is what crosses between them.
"""
