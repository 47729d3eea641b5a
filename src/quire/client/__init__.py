"""A model from its caller's side: text to requests, engine events to text, and the public `LLM` and `AsyncEngine`."""
