"""The CPU backend: numpy buffers and native kernels, no torch. For the families of one table, in their files' formats.

runner         a plan in, a result out
decoder        the model: weights packed once, a whole step behind one native call
layers         what that call is given: structures laid out as native/step/forward.hpp has them
tiles          a step's rows as attention takes them
kv_store       the paged KV memory's data
linear         what a packed weight is to all others, and who packs it
formats        weights as their files hold them, in panels
weight_reader  a model's files to what is packed, a few rows at a time
load           a checkpoint to a runner, within a budget
"""
