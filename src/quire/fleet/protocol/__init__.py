"""What gateways and members send each other: messages, keys, checks of what was received."""
