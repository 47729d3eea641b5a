"""Parses the text of an answer into parts: reasoning, text and tool calls."""
