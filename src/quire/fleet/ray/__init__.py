"""Ray: the configuration of a deployment, and its control. One file here imports ray."""
