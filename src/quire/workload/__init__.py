"""Seeded load: who asks what, and when. Shared by the simulator and the benchmark, so that both mean the same thing.

Standard library only, and nothing of quire: a workload must be able to meet a stranger's server.

    arrivals     when asks come
    prompts      token ids with beginnings in common      ┐ for the simulator,
    requests     one ask                                  │ which sees token ids
    scenarios    named workloads of asks                  ┘
    visits       what one client says, turn by turn       ┐ for servers behind a wire,
    mixes        named workloads of visits                │ strangers' too: content is named,
    traces       published traces as visits               │ and written as text or as
    writing      named content as words or token ids      ┘ token ids when it is sent
"""
