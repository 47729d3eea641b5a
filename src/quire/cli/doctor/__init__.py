"""`quire doctor`: facts about this machine, and rules about them."""
