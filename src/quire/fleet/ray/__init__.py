"""A fleet on Ray Serve: configuration, deployments, member registry. Only `deployments` imports ray."""
