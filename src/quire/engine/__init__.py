"""Runs one model step by step: token ids in, events out. No text, no processes, no concrete backend.

`loading` builds an engine, `engine` runs one step, `loop` is the thread that repeats it, `port` the client's interface.
"""
