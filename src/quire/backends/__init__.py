"""The backends: each computes what a step plan specifies and makes no scheduling decisions.

`protocol` is the complete contract, `oracle` a runner without tensors that exposes every wrong block, `conformance` the
test suite that each runner must pass.
"""
