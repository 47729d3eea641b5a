"""Simulates a fleet: members behind gateways."""
