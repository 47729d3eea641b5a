"""The PyTorch backend, for everything other backends do not support: any full-attention transformers decoder, run
through its own modules with quire's attention; machines without kernels; other devices (untested).

runner      executes a plan
adapter     a transformers model over flat batches
tiles       the rows of a batch, grouped for attention
kv_store    the data of the paged KV memory
attention   queries against blocks, through block tables
linear      matrix products with weights packed once
load        loads a checkpoint into a runner, within a memory budget
"""
