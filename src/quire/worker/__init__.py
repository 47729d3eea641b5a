"""The process that owns a model, and its supervisor: token ids only, nothing of `text/` is loaded in a worker.

`child` is the worker. `parent` is its supervisor: it replaces a worker that died and resubmits open requests.
`messages` is what crosses between them.
"""
