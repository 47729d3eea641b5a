"""Replays a recorded trace through the real scheduler."""
