"""The native CPU kernels as functions of numpy arrays: checks of types and shapes, no decisions.

The bits of a row depend only on the inputs of that row, in every kernel.

extension   loads the native module, or reports why it cannot be used
arrays      checks of arrays before their address is passed to a kernel
products    weights packed once, and products of rows with them
sampling    most likely token, sampled token, sums for log-probabilities
threads     number of compute threads
"""
