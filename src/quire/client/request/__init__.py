"""Convert a caller's prompt, messages and options to token ids with sampling parameters."""
