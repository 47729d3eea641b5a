"""Benchmark for OpenAI-compatible servers, quire or not: load over HTTP, standard metrics, comparison of two servers.

    setup ─► visits ─► load_run ─► calls ─► http_client ─► outcome ─► measures ─► records · plots · compare

Imports workload, the HTTP client, errors and a few helpers, but not quire's engine, because it measures any server. The
exception is `engine.py`, which measures the engine in this process.
"""
