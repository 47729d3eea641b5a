"""Measures any OpenAI-compatible server, ours or a stranger's: load over HTTP, figures the field knows, a verdict.

    setup ─► visits ─► load ─► calls ─► client ─► outcomes ─► measures ─► report · plots · compare

May touch workload and an HTTP client, errors and nothing else of quire: a stranger's server has no core. Only
`engine.py` (and `roof.py`, which it asks) looks inside this process.
"""
