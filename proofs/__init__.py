"""Promises at scale: figures beside the bounds they must keep."""
