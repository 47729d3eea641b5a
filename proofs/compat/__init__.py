"""What changes in the official SDKs: their typed fields, compared with a committed list."""
