"""Chat templates, and the sandboxed processes that render them."""
