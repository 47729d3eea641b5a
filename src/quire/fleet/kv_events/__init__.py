"""KV-cache events between members and gateways: batches, reading, subscribing, relaying."""
