"""APIs and their own schemas, events and errors: what a dialect is, and how requests in any of them are served."""
