"""Steps one model: token ids in, events out. Knows no text, no process and no concrete backend.

`loading` opens it, `engine` is one step on one screen, `loop` is the thread that steps, `port` is how others reach it.
"""
