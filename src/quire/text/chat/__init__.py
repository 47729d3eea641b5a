"""A conversation to token ids: messages, the chat template in a separate process, and control tokens."""
