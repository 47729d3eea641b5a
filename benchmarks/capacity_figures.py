"""The rows of proof-capacity's record that docs/concepts/scale.md shows, with their texts."""

from collections.abc import Sequence

FLEETS = {
    "size_10_hit": "10 members: share of prompt tokens found cached",
    "size_10_imbalance": "10 members: most work over mean",
    "size_10_requests_per_s": "10 members: requests/s",
    "policy_hit_16": "16 members: hits over those of one pool as large as all",
    "policy_imbalance_16": "16 members: most work over mean",
    "gateways_8_hit_16": "16 members, eight gateways: hits over one pool's",
    "gateways_8_ttft_16": "16 members, eight gateways: TTFT p90 over one gateway's",
    "policy_hit_64": "64 members: hits over those of one pool as large as all",
    "policy_imbalance_64": "64 members: most work over mean",
    "gateways_8_hit_64": "64 members, eight gateways: hits over one pool's",
    "gateways_8_ttft_64": "64 members, eight gateways: TTFT p90 over one gateway's",
    "size_100_hit": "100 members: share of prompt tokens found cached",
    "size_100_imbalance": "100 members: most work over mean",
    "size_100_requests_per_s": "100 members: requests/s",
    "members_1000": "1,000 members: requests that ended",
    "members_1000_imbalance": "1,000 members: most work over mean",
    "members_1000_gib": "1,000 members: memory of the simulator, GiB",
    "members_1000_s": "1,000 members: seconds of one core",
}
GATEWAY = {
    "index_bytes": "bytes for each block the index knows",
    "events_per_s": "blocks/s of events, applied to the index",
    "choice_us": "a choice, half of them, us",
    "choice_p99_us": "a choice, p99, us",
    "reserving_us": "choosing and reserving, half of them, us",
    "names_ms": "names of a prompt of 12,800 tokens, ms",
    "sweep_max_ms": "longest pause when a member's entries are swept, ms",
}


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return text columns, not a Markdown table: tables of that page are promises, and simulated figures are not."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(("```text", *(line.rstrip() for line in lines), "```"))
