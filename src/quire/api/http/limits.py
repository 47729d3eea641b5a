"""Every bound of the API, in one place. A client over one of them gets an error message, never a crash.

Bounds on what one answer may be (n, stop strings, log-probabilities, biases) belong to the engine's parameters and are
named here again so that they can be read together.
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
"""Fewer where the limit of open files is low."""
RESERVED_DESCRIPTORS = 256
"""Of the open files the system allows, for the server's own: workers, models, keys, logs."""
SPARE_DESCRIPTORS = 64
"""Of those, how many stay free of connections even where the server's own files need more than expected."""
EVICTED_AT_ONCE = 64
"""When all connections are taken, how many of those that have waited longest without a request make room."""
LEAST_IDLE_S = 0.5
"""A client that has just connected, or has just received a response, may be about to send a request."""
MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together."""
MAX_HEADERS = 100
HEAD_S = 20.0
"""How long a client may take to send the head of a request."""
BODY_S = 60.0
"""How long it may take to send the body."""
KEEP_ALIVE_S = 75
"""How long a connection may be open with no request under way."""
LINGER_S = 2.0
"""How long a client that sent invalid HTTP may go on sending: closing at once would lose the error sent to it."""
MAX_PIPELINED = 16
"""Requests sent before the response to the one before them."""
ARRIVING_SHARE = 0.25
"""Of the places inside, for bodies of one key that are still coming."""
CHECK_S = 5.0
"""How often a connection is checked."""
WRITE_BUFFER_BYTES = 64 * 1024
"""Bytes written and not yet taken by the socket; beyond it a writer waits."""
STUCK_S = 30.0
"""A client that reads nothing for so long is cut."""
STREAM_SILENT_S = 15.0
"""An open stream without data for so long sends a keep-alive: proxies cut what is silent for 30 or 60 s."""

# -- the body ----------------------------------------------------------------------------------------------------------

MAX_BODY_BYTES = 2 * 1000 * 1000
MAX_JSON_DEPTH = 64
MAX_INT_DIGITS = 20
"""A whole number of more digits fits no field."""
ON_LOOP_BYTES = 16 * 1024
"""Larger bodies are read beside the event loop."""

# -- the request -------------------------------------------------------------------------------------------------------

MAX_PROMPTS = 16
MAX_MESSAGES = 4096
MAX_ID_CHARS = 128
"""Of a client's request id, when it is echoed."""
MAX_SALT_CHARS = 1024
MAX_DETOKENIZE_TOKENS = 1 << 18
REQUEST_S = 3600.0
"""A request that is not done by then ends with what it has."""

# -- the response ------------------------------------------------------------------------------------------------------

MAX_ECHOED_CHARS = 200
"""Of a client's own text inside an error message."""
MAX_ANSWER_LOGPROBS = 1 << 18
"""Log-probabilities in one answer, alternatives counted like the tokens they stand beside. A
count, not a size: one takes about 30 to 90 bytes of JSON (a number of up to 20 digits, a token's text or id, a rank or
its bytes; more where a token's text is long), so this is an answer of about 8 to 24 MB: 12,483 tokens with 20
alternatives each, or 131,072 with one."""
LEAST_LOGPROB = -9999.0
"""JSON has no infinity; the floor that other servers use."""
MAX_WATCHERS = 16
"""Readers of the operator's stream, all models together."""
WATCH_PERIOD_S = 0.4
"""How often an engine sends a snapshot while there are watchers."""
WATCH_BEAT_S = 0.45
"""After so long an event comes all the same."""
WATCH_RETRY_S = 5
FULL_RETRY_S = 2
"""Retry-After where there is no estimate."""
LOADING_RETRY_S = 5
DEAD_RETRY_S = 10
