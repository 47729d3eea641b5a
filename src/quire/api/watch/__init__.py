"""The state of the server at this moment, for its operators: one bounded stream of events, many readers."""
