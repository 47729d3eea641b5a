"""Weights in the formats of their files. Every step reads the packed weights in full. Needs numpy and `quire._native`.

weight_format       the table of weight formats
source              tensors read from a file into panels, in chunks
gguf_source         tensors of GGUF files
safetensors_source  tensors of safetensors files: compressed-tensors, AWQ, GPTQ and fp8
packed_weight       weights in panels
"""
