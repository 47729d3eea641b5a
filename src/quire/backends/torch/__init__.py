"""The PyTorch backend: one runner for CPU first, correct in every detail, each part replaceable.

runner      a plan in, a result out
inputs      the plan as flat tensors, and as tiles for attention
models/     decoder (Llama, Mistral, Qwen2, Qwen3) and adapter (other decoders of transformers)
kv_store    the paged KV memory's data
attention   queries against blocks, through block tables
large_pages memory that is read from end to end
linear      matrix products with weights packed once
sampler     logits to tokens, a pure function per row
weights     safetensors to tensors, one at a time
memory      what fits in how many bytes, decided at start
"""
