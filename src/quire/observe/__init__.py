"""Metrics, logs, traces and spans. Callers pass in plain values; this package imports neither engine nor API."""
