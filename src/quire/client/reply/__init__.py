"""Convert the engine's token events to pieces of text for the client."""
