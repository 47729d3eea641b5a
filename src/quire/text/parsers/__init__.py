"""From an answer's characters to its parts: what the model thinks, what it says, what it calls."""
