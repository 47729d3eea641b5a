"""`quire bench`: measure a server, or quire's engine in this process."""
