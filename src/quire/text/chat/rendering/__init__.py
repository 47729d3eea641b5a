"""Chat templates, and the processes that render them in a sandbox."""
