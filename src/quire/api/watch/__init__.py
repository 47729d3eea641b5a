"""Live state of the server for its operators: one bounded stream of events with many subscribers."""
