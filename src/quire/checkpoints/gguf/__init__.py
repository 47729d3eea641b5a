"""Reading GGUF files: header, architectures, tokenizer, tensors."""
