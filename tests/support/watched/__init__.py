"""A folder to put before others in PYTHONPATH: every interpreter that starts with it tells whom it talks to."""
