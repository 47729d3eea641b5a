"""How many connections there may be: what the system's limit of open files leaves for them."""

import resource
from math import inf

from quire.api.http.limits import MAX_CONNECTIONS, RESERVED_DESCRIPTORS, SPARE_DESCRIPTORS


def max_connections() -> int:
    """No more than the bound, and never so many that the server's own files cannot be opened any more.

    Where the limit is very low, half of it is the server's own.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(limit - RESERVED_DESCRIPTORS, limit // 2))


def last_descriptor() -> float:
    """The highest number that a connection may have: some are left whatever else is open. A quarter of a low limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return inf if limit == resource.RLIM_INFINITY else limit - 1 - min(SPARE_DESCRIPTORS, limit // 4)


def allow_many_connections() -> str | None:
    """Raise the limit as far as the system lets us: its usual one is low. A warning where that is not far enough."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS if most == resource.RLIM_INFINITY else min(most, 2 * MAX_CONNECTIONS)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    if (count := max_connections()) == MAX_CONNECTIONS:
        return None
    return (
        f"the limit of open files is {most:,}, which allows {count:,} connections instead of {MAX_CONNECTIONS:,}; "
        f"raise it with: ulimit -n {MAX_CONNECTIONS + RESERVED_DESCRIPTORS}"
    )
