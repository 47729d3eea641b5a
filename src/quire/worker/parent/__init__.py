"""The supervisor of a worker: spawning, sessions, and the ledger of open requests."""
