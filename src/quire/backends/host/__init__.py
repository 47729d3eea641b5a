"""The host side of a step, shared by all tensor backends: numpy arrays in and out, no device.

runner_base   executes a plan
batch         a plan as flat arrays
wanted        the rows whose outputs are requested, and the results computed from them
sampler       logits to tokens, a pure function per row; drawing and exponential are its arithmetic
token_lists   token lists converted to arrays once per request
block_store   KV shape of a layer; the data of a block pool: copies, conversion to bytes
rope          rotary position embeddings
worst_step    steps that run at load to measure peak memory and cost
"""
