"""The conformance test suite for every backend."""
