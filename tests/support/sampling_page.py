"""Generate the reference page of sampling parameters: `python -m tests.support.sampling_page`."""

from dataclasses import MISSING, Field, fields
from typing import Any

from quire.client.request.params import SamplingParams

HEAD = """\
# Sampling parameters

Made from the code by `python -m tests.support.sampling_page >
docs/reference/sampling.md`; a test compares.

`quire.SamplingParams` takes these by name. For None, the value of the model's
`generation_config.json` is used, or no change if it has none. A value outside its range is refused
before the request is queued.

| name | default | range | what it does |
|---|---|---|---|
"""

TAIL = """
In this order: penalties, bias and bans, then temperature, min-p, top-k, top-p, and one draw.
Log-probabilities are of the raw logits. The seed, the number of the answer and the position
determine the random number of a token, so the same seed gives the same tokens alone, in a batch,
after a preemption and in another process.

Lists of tokens may contain the whole vocabulary: they are prepared once for a request.
`quire serve` limits the log-probabilities of one answer to 262,144, alternatives included, before
it computes anything.
"""


def params_page() -> str:
    """Return the expected content of `docs/reference/sampling.md`."""
    return HEAD + "".join(_row(one) for one in fields(SamplingParams)) + TAIL


def _row(one: Field[Any]) -> str:
    low, high = one.metadata.get("low"), one.metadata.get("high")
    limits = "" if low is None or high is None else f"{_number(low)} to {_number(high)}"
    default = one.default if one.default is not MISSING else {}
    return f"| `{one.name}` | `{default!r}` | {limits} | {one.metadata['doc']} |\n"


def _number(value: float) -> str:
    for exponent in (30, 31, 63, 64):
        for sign, power in (("", 1 << exponent), ("-", -(1 << exponent))):
            if isinstance(value, int) and value in (power, power - 1):
                return f"{sign}2^{exponent}" + ("" if value == power else " - 1")
    return f"{value:g}"


if __name__ == "__main__":
    print(params_page(), end="")  # noqa: T201 - its whole purpose
