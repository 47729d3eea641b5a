"""The worker process, which owns a model, and its supervisor. Both handle token ids only, and import no `text/`.

`child` is the worker. `parent` is its supervisor: it replaces a worker that died and resubmits open requests.
`messages` defines the messages between them.
"""
