"""The models of a server: always there, or loaded on demand in turns."""
