"""Grammars of answers, and the process that checks them."""
