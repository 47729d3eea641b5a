"""KV-cache events from members to gateways: parsing batches, updating the block index, subscribing, relaying."""
