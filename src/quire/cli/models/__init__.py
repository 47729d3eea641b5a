"""`quire models`, `pull`, `rm` and `info`: the models on this machine."""
