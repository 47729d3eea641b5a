"""The PyTorch backend: what only it can do. Any full-attention decoder of transformers through its own modules with our
attention, machines without kernels, other devices (untested).

runner      a plan in, a result out
adapter     a model of transformers over flat batches
tiles       a batch's rows as attention takes them
kv_store    the paged KV memory's data
attention   queries against blocks, through block tables
linear      matrix products with weights packed once
load        a checkpoint to a runner, within a budget
"""
