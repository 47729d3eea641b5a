"""Other servers, each in a virtual environment of its own, started beside ours and measured interleaved."""
