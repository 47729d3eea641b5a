"""Explanations of prefix-cache misses, and warnings about prompt lines that cause repeated misses."""
