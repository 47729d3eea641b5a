"""How many servers of which size a trace needs."""
