"""All limits of the API. A request that exceeds one gets an error response.

Limits of sampling parameters (n, stop strings, log-probabilities) are defined in `params` and re-exported here, so that
all limits can be read in one place.
"""

from quire.client.reply.stream import MAX_PENDING, MAX_PENDING_BYTES
from quire.client.request.params import MAX_ANSWERS, MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOPS
from quire.strict_json import MAX_JSON_LISTS

__all__ = [
    "MAX_ANSWERS",
    "MAX_JSON_LISTS",
    "MAX_LOGPROBS",
    "MAX_PENDING",
    "MAX_PENDING_BYTES",
    "MAX_STOPS",
    "MAX_STOP_CHARS",
]

# -- the connection ----------------------------------------------------------------------------------------------------

MAX_CONNECTIONS = 8192
"""Maximum open connections; fewer if the limit of open files is low."""
RESERVED_DESCRIPTORS = 256
"""File descriptors reserved for the server itself: workers, models, keys, logs."""
SPARE_DESCRIPTORS = 64
"""File descriptors never used for connections, even if the server opens more files than reserved."""
MAX_EVICTIONS = 64
"""Maximum idle connections closed at once when all connections are in use."""
MIN_IDLE_S = 0.5
"""Minimum idle time before a connection may be closed, because a client may be about to send a request."""
MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of the head of a request."""
MAX_HEADERS = 100
HEAD_S = 20.0
"""Time limit for receiving the head of a request: request line and headers."""
BODY_S = 60.0
"""Time limit for receiving the body."""
KEEP_ALIVE_S = 75
"""Maximum idle time of a connection."""
LINGER_S = 2.0
"""Delay before a connection with invalid HTTP is closed; an immediate close could discard the error response."""
MAX_PIPELINED = 16
"""Maximum pipelined requests waiting on one connection."""
MAX_UPLOADS_SHARE = 0.25
"""Maximum fraction of the admission slots that requests of one key occupy while their bodies are in transfer."""
CHECK_S = 5.0
"""Interval of checking connections."""
WRITE_BUFFER_BYTES = 64 * 1024
"""High-water mark of unsent bytes per connection; above it, writers wait."""
STUCK_S = 30.0
"""A client that reads nothing of a response for this time is disconnected."""
STREAM_SILENT_S = 10.0
"""Maximum interval between two events of an open stream: clients warn or give up after 15 to 300 silent seconds, and
proxies close silent streams after 30 or 60 s."""

# -- the body ----------------------------------------------------------------------------------------------------------

MAX_BODY_BYTES = 2 * 1000 * 1000
MAX_JSON_DEPTH = 64
MAX_INT_DIGITS = 20
"""Maximum digits of an integer in a body; the range of every field is smaller."""
ON_LOOP_BYTES = 16 * 1024
"""Larger bodies and larger batches of output are processed in a thread, not on the event loop."""

# -- the request -------------------------------------------------------------------------------------------------------

MAX_PROMPTS = 16
MAX_MESSAGES = 4096
MAX_ID_CHARS = 128
"""Maximum length of a client's request id that is echoed."""
MAX_SALT_CHARS = 1024
MAX_DETOKENIZE_TOKENS = 1 << 18
REQUEST_S = 3600.0
"""Time limit of a request, after which it ends with the output produced so far."""

# -- the response ------------------------------------------------------------------------------------------------------

MAX_ECHOED_CHARS = 200
"""Maximum characters of a client's text quoted in an error message."""
MAX_ANSWER_LOGPROBS = 1 << 18
"""Maximum log-probabilities in one response, including alternatives. A count, not a size: each takes about 30 to 90
bytes of JSON (a number of up to 20 digits, a token's text or id, a rank or bytes; more if the token's text is long),
so the maximum is about 8 to 24 MB: 12,483 tokens with 20 alternatives each, or 131,072 tokens with one."""
MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have; other servers use the same value."""
MAX_WATCHERS = 16
"""Maximum clients of the operator's event stream, over all models."""
WATCH_PERIOD_S = 0.4
"""Interval of an engine's snapshots while there are watchers."""
WATCH_MAX_INTERVAL_S = 0.45
"""Maximum interval of events to watchers, even without a new snapshot."""
WATCH_RETRY_S = 5
FULL_RETRY_S = 2
"""Retry-After if the waiting time cannot be estimated."""
LOADING_RETRY_S = 5
DEAD_RETRY_S = 10
