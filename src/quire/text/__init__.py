"""Text to token ids and back. Imports checkpoints and libraries for text; no engine, no worker, no tensors.

`tokenizer`, `detokenizer` and `stop_strings` work on bytes; `chat/` turns a conversation into ids.
"""
