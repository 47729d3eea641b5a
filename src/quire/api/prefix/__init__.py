"""Routes and notes about prefix reuse: explanations, warnings."""
