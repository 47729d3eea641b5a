"""From what a caller wrote to token ids with sampling parameters."""
