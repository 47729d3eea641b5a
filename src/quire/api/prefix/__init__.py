"""Routes and headers about prefix reuse: explanations and warnings."""
