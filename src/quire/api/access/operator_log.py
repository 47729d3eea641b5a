"""Log lines for the operator: unknown body parameters, and prompt lines that repeatedly cause cache misses."""

import logging

from quire.api.http.errors import printable_name
from quire.api.http.request_record import RequestRecord
from quire.client.prefix.prefix_guard import PrefixWarning

LOG = logging.getLogger("quire.api")
PREFIX_LOG = logging.getLogger("quire.prefix")
MAX_NAMES = 256
"""Maximum distinct names logged, because clients choose them; further names appear only in response headers."""


class IgnoredLog:
    """Logs each unknown parameter once, up to MAX_NAMES. Used from one event loop."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def note(self, record: RequestRecord) -> None:
        """Log a request's ignored parameters that were not logged before."""
        new = [name for name in record.ignored if name not in self._names][: MAX_NAMES - len(self._names)]
        if not new:
            return
        self._names.update(new)
        LOG.warning(
            "%s %s of tenant %s: ignored unknown parameters: %s",
            record.method,
            record.path,
            record.tenant,
            ", ".join(map(printable_name, new)),
        )


def log_warning(warning: PrefixWarning) -> None:
    """Log a warning's tenant, kind and cost. The prompt line is confidential and never logged."""
    PREFIX_LOG.warning(
        "tenant %s, model %s: %s cost %d tokens in the last hour, in %d requests; GET /cache/warnings on the admin "
        "socket shows the line",
        warning.tenant,
        warning.model,
        warning.description,
        warning.num_lost_tokens,
        warning.num_requests,
    )
