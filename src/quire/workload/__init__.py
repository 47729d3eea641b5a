"""Seeded load: what is sent, and when. Shared by the simulator and the benchmark, so that both mean the same thing.

Standard library only, and nothing of quire: a workload must be able to meet any server.

    arrivals     when requests come
    prompts      token ids with beginnings in common      ┐ for the simulator,
    requests     one request                              │ which sees token ids
    scenarios    named workloads of requests              ┘
    visits       what one client sends, turn by turn      ┐ for servers behind a wire,
    mixes        named workloads of visits                │ quire or not: content is named,
    traces       published traces as visits               │ and written as text or as
    writing      named content as text or token ids       ┘ token ids when it is sent
"""
