"""The host's part of a step, the same for every backend with tensors: numpy arrays in and out, no device.

batch         a plan as flat arrays
wanted        which rows need logits, and what becomes of them
sampler       logits to tokens, a pure function per row; drawing and exponential are its arithmetic
token_lists   lists of tokens made once for a request
decoder_shape the sizes and windows of a decoder, from its config
rope          rotary positions
worst_step    the plans that show how much a step takes at most
"""
