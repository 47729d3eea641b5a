"""The objects a caller holds: a model in this process, in a worker, or on demand."""
