"""The process that owns a model, and its supervisor. Token ids only: a worker imports nothing from `text/`.

`child` is the worker. `parent` is its supervisor: it replaces a worker that died and resubmits open requests.
`messages` defines the messages between them.
"""
