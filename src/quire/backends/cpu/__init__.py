"""The CPU backend: numpy buffers and native kernels, no torch."""
