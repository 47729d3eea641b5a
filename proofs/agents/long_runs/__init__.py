"""Proofs of requests that wait long, and of what ends a run."""
