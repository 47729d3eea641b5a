"""`quire doctor`: facts about this machine, and rules that turn facts into advice."""
