"""What supervises that process: start, sessions, the ledger of open requests."""
