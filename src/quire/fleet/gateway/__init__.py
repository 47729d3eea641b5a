"""The gateway: its port to the client, its links to members."""
