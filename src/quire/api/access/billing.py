"""Charge requests to the quota of their key. Reads only the clock, and changes only the quota.

    before the body is read   nothing is charged, but a key with an exhausted quota is refused
    after the body is read    one request, and a token for every 8 bytes: before parsing, rendering and tokenization
    after tokenization        corrected to the exact amount: one request for each answer, and the prompt's tokens
    with every piece          its output tokens

The correction never refuses a request: an admitted one may overdraw a bucket, which must refill before the next is
admitted. So processed text is never discarded, and a client that returns after `Retry-After` is admitted. A request
refused with `Retry-After` is not charged; after other errors the charge remains.
"""

from dataclasses import dataclass
from time import monotonic

from quire.api.access.auth import Caller
from quire.api.http.errors import ApiError

TEXT_BYTES_PER_TOKEN = 8
"""More than the average bytes per token of usual text, so that the estimate stays below the number of tokens."""


@dataclass(slots=True)
class Bill:
    """The requests and tokens charged for one request so far."""

    caller: Caller
    num_requests: int = 0
    num_tokens: int = 0
    _num_output_tokens: int = 0

    def settle(self, num_requests: int, num_prompt_tokens: int) -> None:
        """Replace the estimated charge by the exact number of requests and prompt tokens."""
        self._charge(num_requests - self.num_requests, num_prompt_tokens - self.num_tokens)

    def count_output(self, num_tokens: int) -> None:
        """Charge output tokens; `num_tokens` is the total of all answers so far."""
        self._charge(0, num_tokens - self._num_output_tokens)
        self._num_output_tokens = num_tokens

    def refund(self) -> None:
        """Return the whole charge."""
        self._charge(-self.num_requests, -self.num_tokens)

    def _charge(self, num_requests: int, num_tokens: int) -> None:
        """Add to the charge; negative numbers reduce it and refill the buckets."""
        now_s, quota = monotonic(), self.caller.quota
        for bucket, count in ((quota.requests, num_requests), (quota.tokens, num_tokens)):
            if bucket is not None and count > 0:
                bucket.take(count, now_s)
            elif bucket is not None:
                bucket.give_back(-count)
        self.num_requests += num_requests
        self.num_tokens += num_tokens


def text_tokens(num_bytes: int, max_tokens: int | None) -> int:
    """Return the estimated tokens charged for a body before it is parsed.

    The estimate is at most `max_tokens`, the maximum sequence length of the models, if known: no prompt is tokenized
    beyond it. So a refused body never costs more than the longest valid prompt.
    """
    estimate = -(-num_bytes // TEXT_BYTES_PER_TOKEN)
    return estimate if max_tokens is None else min(estimate, max_tokens)


def check_quota(caller: Caller, num_bytes: int, max_tokens: int | None) -> int:
    """Return the tokens charged for a body of `num_bytes`. Raises ApiError with the time to wait if one request with
    these tokens exceeds the quota."""
    now_s, quota, num_tokens = monotonic(), caller.quota, text_tokens(num_bytes, max_tokens)
    for unit, bucket, count in (("requests", quota.requests, 1), ("tokens", quota.tokens, num_tokens)):
        wait_s = bucket.wait_s(count, now_s) if bucket is not None else 0.0
        if bucket is not None and wait_s > 0:
            message = f"expected at most {bucket.per_minute} {unit} a minute for this key; try again in {wait_s:.0f} s"
            raise ApiError(429, "rate_limit_exceeded", message, None, wait_s, rate_headers(caller))
    return num_tokens


def open_bill(caller: Caller, num_bytes: int, max_tokens: int | None) -> Bill:
    """Charge one request and the tokens of a body. Raises ApiError with the time to wait if the quota is exceeded."""
    num_tokens = check_quota(caller, num_bytes, max_tokens)
    bill = Bill(caller)
    bill.settle(1, num_tokens)
    return bill


def rate_headers(caller: Caller) -> tuple[tuple[str, str], ...]:
    """Return `x-ratelimit-` headers, as other APIs send them, for the limits that the key has."""
    now_s, headers = monotonic(), []
    for unit, bucket in (("requests", caller.quota.requests), ("tokens", caller.quota.tokens)):
        if bucket is not None:
            headers += [
                (f"x-ratelimit-limit-{unit}", str(bucket.per_minute)),
                (f"x-ratelimit-remaining-{unit}", str(bucket.available(now_s))),
                (f"x-ratelimit-reset-{unit}", f"{bucket.reset_s(now_s):.3f}s"),
            ]
    return tuple(headers)
