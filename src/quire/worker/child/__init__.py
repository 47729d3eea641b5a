"""The process that owns a model."""
