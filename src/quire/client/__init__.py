"""The model as the parent process sees it: text to requests, events to text, and the public `LLM` and `AsyncEngine`."""
