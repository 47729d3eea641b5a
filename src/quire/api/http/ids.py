"""Ids of requests: inside always the server's own; a client's own is echoed if it is harmless, and used for nothing."""

import re
from uuid import uuid4

from quire.api.http.limits import MAX_ID_CHARS

HARMLESS = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_ID_CHARS}}}")
"""A client's id for its request is echoed in a header and logged if it matches this."""


def new_id(prefix: str) -> str:
    """`chatcmpl-` and 32 hexadecimal digits."""
    return f"{prefix}-{uuid4().hex}"
