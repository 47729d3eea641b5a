"""Log lines for the operator about prompts that repeatedly miss the cache."""

import logging

from quire.client.prefix.prefix_guard import PrefixWarning

LOG = logging.getLogger("quire.prefix")


def log_warning(found: PrefixWarning) -> None:
    """Log the tenant, the kind and the cost. Lines of prompts are the tenant's, and never logged."""
    LOG.warning(
        "tenant %s, model %s: %s cost %d tokens in the last hour, in %d requests; GET /cache/warnings on the admin "
        "socket shows the line",
        found.tenant,
        found.model,
        found.description,
        found.num_lost_tokens,
        found.num_requests,
    )
