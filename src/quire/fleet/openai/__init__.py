"""OpenAI servers (vLLM and its like) as members."""
