"""Metrics, logs, traces and spans. Callers pass plain values; this package imports neither the engine nor the API."""
