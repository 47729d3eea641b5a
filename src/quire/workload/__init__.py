"""Seeded workloads: requests and their arrival times. The simulator and the benchmark use the same definitions.

Standard library only, without imports from the rest of quire, so that a workload can be sent to any server.

    arrivals           arrival times
    scenarios          named workloads of requests         ┐ for the simulator,
    workload_request   one request                         ┘ whose prompts are token ids
    visits             one client's conversation           ┐ for servers over HTTP,
    mixes              named workloads of visits           │ quire or not: content has a name,
    traces             published traces as visits          │ and is generated as text or
    writing            named content as text or token ids  ┘ token ids when it is sent
"""
