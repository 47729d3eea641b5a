"""`quire fleet`: gateways, members and Ray."""
