"""The CPU backend: native kernels without torch, for the families in the family table, with weights in file formats.

runner         executes a plan
decoder        the model: weights packed once, one native call per step
layers         the structures passed to that call, laid out like native/step/forward.hpp
tiles          the rows of a step, grouped for attention
kv_store       the data of the paged KV memory
linear         packed weights, and the class that packs them
formats        weights in the format of their file, packed into panels of 16 outputs
weight_reader  reads a model's files in chunks of rows for packing
load           loads a checkpoint into a runner, within a memory budget
"""
