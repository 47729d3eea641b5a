"""The backends: each computes what a plan (the work of one step) specifies and makes no decisions.

`protocol` is the complete contract, `oracle` a runner without tensors that detects every wrong block, `conformance` the
test suite that each runner must pass.
"""
