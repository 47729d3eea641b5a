"""Metrics and logs. Takes plain figures from its callers; knows neither the engine nor the API."""
