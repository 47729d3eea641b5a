"""The models of a server: loaded permanently, or loaded and unloaded on demand in turns."""
