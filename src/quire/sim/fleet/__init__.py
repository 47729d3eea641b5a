"""A fleet of simulated servers behind gateways."""
