"""Access control: API keys, quotas, allowed origins, admission of requests, and stored conversations."""
