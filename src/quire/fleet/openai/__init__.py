"""OpenAI-compatible servers such as vLLM as members of a fleet."""
