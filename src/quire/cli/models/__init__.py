"""`quire models`, `pull`, `rm` and `info`: the models of this machine."""
