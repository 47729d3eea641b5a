"""The host's part of a step, the same for every backend with tensors: numpy arrays in and out, no device.

runner_base   a plan in, a result out
batch         a plan as flat arrays
wanted        which rows need logits, and what becomes of them
sampler       logits to tokens, a pure function per row; drawing and exponential are its arithmetic
token_lists   lists of tokens made once for a request
kv_shape      what a token takes in each layer
rope          rotary positions
worst_step    steps that are run at load: how much memory they take at most, how long they take
"""
