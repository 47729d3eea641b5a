"""Helper processes: work that a client's input could make last or grow, in processes with bounds."""
