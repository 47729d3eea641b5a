"""The contract that every backend is tested against."""
