"""From token events to pieces of text."""
