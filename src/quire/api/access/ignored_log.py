"""The log's line about parameters that no dialect reads: once for each name, and for so many names."""

import logging

from quire.api.http.errors import shown_name
from quire.api.http.request_record import RequestRecord

LOG = logging.getLogger("quire.api")
MAX_NAMES = 256
"""Clients choose names: later ones appear only in response headers."""


class IgnoredLog:
    """Remembers which names were logged. For one event loop."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def note(self, record: RequestRecord) -> None:
        """Log what is new of a request's."""
        new = [name for name in record.ignored if name not in self._names][: MAX_NAMES - len(self._names)]
        if not new:
            return
        self._names.update(new)
        LOG.warning(
            "%s %s of tenant %s: ignored unknown parameters: %s",
            record.method,
            record.path,
            record.tenant,
            ", ".join(map(shown_name, new)),
        )
