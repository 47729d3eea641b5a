"""APIs and their own shapes, events and errors: what a dialect is, and how any of them is answered."""
