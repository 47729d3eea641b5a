"""Names of requests: always ours inside; a client's own is echoed if it is harmless, and used for nothing."""

import re
from uuid import uuid4

from quire.api.http.limits import MAX_ID_CHARS

HARMLESS = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_ID_CHARS}}}")
"""A client's name for its request may come back in a header and stand in the log if it looks like this."""


def new_id(prefix: str) -> str:
    """`chatcmpl-` and 32 hexadecimal digits."""
    return f"{prefix}-{uuid4().hex}"
