"""Grammars for structured output, and the process that checks them."""
