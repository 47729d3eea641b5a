"""A fleet on Ray Serve: its configuration and its deployments. One file here imports ray."""
