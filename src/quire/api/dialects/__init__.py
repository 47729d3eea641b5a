"""The API dialects (OpenAI, Anthropic): schemas, stream events and errors, and how requests in them are served."""
