"""The log's lines about prompts that are not found again, for whoever runs the server."""

import logging

from quire.client.prefix.prefix_guard import PrefixWarning

LOG = logging.getLogger("quire.prefix")


def log_warning(found: PrefixWarning) -> None:
    """Who, what kind and how much. Lines are their tenant's, and no log's."""
    LOG.warning(
        "tenant %s, model %s: %s cost %d tokens in the last hour, in %d requests; GET /cache/warnings on the admin "
        "socket shows the line",
        found.tenant,
        found.model,
        found.description,
        found.num_lost_tokens,
        found.num_requests,
    )
