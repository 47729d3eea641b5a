"""The server as it is at this moment, for those who run it: one bounded stream of events, many readers."""
