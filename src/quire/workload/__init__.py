"""Seeded load: who asks what, and when. Shared by the simulator and the benchmark, so that both mean the same thing.

Standard library only, and nothing of quire: a workload must be able to meet a stranger's server. `requests` says what
an ask is, `arrivals` when asks come, `prompts` what they have in common, `scenarios` puts them together under a name.
"""
