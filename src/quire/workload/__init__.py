"""Seeded workloads: requests and their arrival times. The simulator and the benchmark use the same definitions.

Standard library only, without imports from the rest of quire, so that a workload can be sent to any server.

    arrivals           arrival times
    scenarios          named workloads of requests         ┐ for the simulator,
    workload_request   one request                         ┘ whose prompts are token ids
    visits             one client's conversation           ┐ for HTTP servers, quire or others:
    mixes              named workloads of visits           │ content is a name and a length, and is
    traces             published traces as visits          │ generated as text or token ids
    writing            named content as text or token ids  ┘ when a request is sent
"""
