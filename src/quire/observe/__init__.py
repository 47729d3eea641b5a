"""Metrics and logs. Takes plain figures from its callers; imports neither the engine nor the API."""
