"""A conversation to token ids: messages, the template in a process of its own, and which control tokens it wrote."""
