"""The same bits in any circumstance, through `quire serve` with a real model: alone, in a batch, cached, in chunks."""

import pytest

from tests.promises.conftest import Served
from tests.promises.test_cache import tokens

COMPLETE = "/v1/completions"


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.9, "seed": 11}])
def test_a_token_has_the_same_bits_alone_in_company_and_cached(served: Served, sampling: dict[str, float]) -> None:
    """Log-probabilities are compared as they were sent: to the last digit."""
    prompt, server = tokens(150), served.server
    asked = {"model": "one", "prompt": prompt, "max_tokens": 12, "logprobs": 5, "ignore_eos": True, **sampling}
    alone = server.post(COMPLETE, asked, served.alice).json
    cached = server.post(COMPLETE, asked, served.alice).json
    strangers = [{**asked, "prompt": tokens(40 + 90 * at), "max_tokens": 30} for at in range(3)]
    others = [server.later(COMPLETE, stranger, served.bob) for stranger in strangers]
    in_company = server.post(COMPLETE, asked, served.bob).json
    for one in others:
        assert one.result().status == 200
    assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
    assert in_company["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for one in (cached, in_company):
        assert one["choices"][0]["logprobs"] == alone["choices"][0]["logprobs"]
        assert one["choices"][0]["text"] == alone["choices"][0]["text"]
