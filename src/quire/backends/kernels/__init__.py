"""The native CPU kernels as functions of numpy arrays, with checks of types and shapes.

In every kernel, the bits of a row depend only on the inputs of that row.

extension   loads the native module, or reports why it cannot be used
arrays      checks of arrays before their address is passed to a kernel
products    matrix products with weights packed once
sampling    most likely token, sampled token, sums for log-probabilities
threads     number of compute threads
"""
