"""The gateway: the engine port that clients use, and the links to members."""
