"""Compares quire with other engines, each in its own virtual environment, in alternating rounds."""
