"""The native CPU kernels as functions of numpy arrays: checks types and shapes, passes addresses, decides nothing.

What every kernel promises: the bits of a row depend on that row's own inputs alone.

extension   the module itself, or why it cannot be used here
arrays      what the kernels ask of an array before they take its address
products    weights packed once, and rows times them
sampling    the likeliest token, a drawn one, sums for log-probabilities
threads     how many threads compute
"""
