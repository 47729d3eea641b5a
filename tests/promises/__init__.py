"""What the front page and the concept pages promise, reached as a user reaches it."""
