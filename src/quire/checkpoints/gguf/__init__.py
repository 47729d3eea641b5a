"""GGUF files: header, types, tokenizer, tensors."""
