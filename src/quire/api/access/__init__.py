"""Who may ask, how much and how many at once: keys, quotas, origins, admission, and the record of each request."""
