"""Text to token ids and back. Imports checkpoints and text libraries, but no engine, worker or tensors.

`tokenizer`, `detokenizer` and `stop_strings` convert texts; `chat/` converts a conversation to token ids.
"""
