"""The worker: the process that owns a model."""
