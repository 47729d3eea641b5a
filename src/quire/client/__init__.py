"""The parent's side of a model: text to requests, events to text, and the public `LLM` and `AsyncEngine`."""
