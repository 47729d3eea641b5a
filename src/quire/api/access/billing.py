"""What a request takes from its key's quota, and when. Pure but for the clock.

    before the body is read   nothing is taken, but a key that has nothing left is refused
    when its bytes are there  one request, and a token for every 8 bytes: before parsing, rendering and tokenization
    when its text is known    settled to the real figures: one request for each answer, the prompt's tokens
    with every piece          its output tokens

Settling never refuses a request: an admitted one may overdraw a bucket, which must refill before the next is admitted.
So text is never processed for nothing, and a client that returns after `Retry-After` is admitted. A request refused
with `Retry-After` costs nothing; after other errors the charge remains.
"""

from dataclasses import dataclass
from time import monotonic

from quire.api.access.auth import Caller
from quire.api.access.quotas import Quota
from quire.api.http.errors import ApiError

TEXT_BYTES_PER_TOKEN = 8
"""More than a token of any usual text has, so that a body is never charged more by its bytes than by its tokens."""


@dataclass(slots=True)
class Bill:
    """What one request has taken so far."""

    quota: Quota
    num_requests: int = 0
    num_tokens: int = 0
    _num_output_tokens: int = 0

    def settle(self, num_requests: int, num_prompt_tokens: int) -> None:
        """Its real figures are known."""
        self._take(num_requests - self.num_requests, num_prompt_tokens - self.num_tokens)

    def count_output(self, num_tokens: int) -> None:
        """So many tokens of all its answers have come by now."""
        self._take(0, num_tokens - self._num_output_tokens)
        self._num_output_tokens = num_tokens

    def refund(self) -> None:
        """Give all of it back."""
        self._take(-self.num_requests, -self.num_tokens)

    def _take(self, num_requests: int, num_tokens: int) -> None:
        """Change what is taken; less than nothing gives back."""
        now_s = monotonic()
        for bucket, count in ((self.quota.requests, num_requests), (self.quota.tokens, num_tokens)):
            if bucket is not None and count > 0:
                bucket.take(count, now_s)
            elif bucket is not None:
                bucket.give_back(-count)
        self.num_requests += num_requests
        self.num_tokens += num_tokens


def text_tokens(num_bytes: int, longest: int | None) -> int:
    """The tokens that a body is charged for before it is parsed.

    Never more than `longest`, the longest sequence there is, if that is known: no prompt is tokenised beyond it, so no
    body costs more work than that, and what a client is charged for a refused one is what the longest prompt that fits
    would have cost.
    """
    estimate = -(-num_bytes // TEXT_BYTES_PER_TOKEN)
    return estimate if longest is None else min(estimate, longest)


def check_quota(caller: Caller, num_bytes: int, longest: int | None) -> int:
    """The tokens that a body of so many bytes is charged for. Raises ApiError, with the time to wait, if one more
    request with them is over the quota."""
    now_s, quota, num_tokens = monotonic(), caller.quota, text_tokens(num_bytes, longest)
    for what, bucket, count in (("requests", quota.requests, 1), ("tokens", quota.tokens, num_tokens)):
        wait_s = bucket.wait_s(count, now_s) if bucket is not None else 0.0
        if bucket is not None and wait_s > 0:
            message = f"expected at most {bucket.per_minute} {what} a minute for this key; try again in {wait_s:.0f} s"
            raise ApiError(429, "rate_limit_exceeded", message, None, wait_s, rate_headers(caller))
    return num_tokens


def opened_bill(caller: Caller, num_bytes: int, longest: int | None) -> Bill:
    """Take one request and the tokens of a body. Raises ApiError, with the time to wait, if they are not available."""
    num_tokens = check_quota(caller, num_bytes, longest)
    bill = Bill(caller.quota)
    bill.settle(1, num_tokens)
    return bill


def rate_headers(caller: Caller) -> tuple[tuple[str, str], ...]:
    """The field's `x-ratelimit-` headers, as far as the key has limits."""
    now_s, headers = monotonic(), []
    for what, bucket in (("requests", caller.quota.requests), ("tokens", caller.quota.tokens)):
        if bucket is not None:
            headers += [
                (f"x-ratelimit-limit-{what}", str(bucket.per_minute)),
                (f"x-ratelimit-remaining-{what}", str(bucket.left(now_s))),
                (f"x-ratelimit-reset-{what}", f"{bucket.reset_s(now_s):.3f}s"),
            ]
    return tuple(headers)
