"""The seam. A backend computes what a plan says and never decides.

`protocol` is the whole contract, `oracle` a runner without tensors that notices every wrong block, `conformance` the
kit that each runner must pass.
"""
