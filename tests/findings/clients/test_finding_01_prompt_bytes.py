"""Finding 1, the tokenizer's part: a text far longer than the longest sequence is not tokenised to its end.

Bounds were in characters, 64 for each token, and every id of a text was made and looked at in Python.
"""

from collections.abc import Iterator

import pytest

from tests.support.servers.local_api import LiveServer, house


@pytest.fixture(scope="module")
def here() -> Iterator[LiveServer]:
    with house() as one:
        yield one


def test_a_text_is_measured_in_bytes_before_it_is_tokenised(here: LiveServer) -> None:
    """2,000 characters, 8,000 bytes: no 512 tokens are that many."""
    refused = here.post("/tokenize", {"model": "oracle", "prompt": "👍" * 2000})
    assert (refused.status, refused.json.get("count")) == (400, None)
    assert refused.code == "context_length_exceeded"
    assert "bytes" in refused.json["error"]["message"]


@pytest.mark.parametrize("asked", [{"prompt": "!?" * 1500}, {"messages": [{"role": "user", "content": "!?" * 1500}]}])
def test_what_has_more_tokens_than_any_sequence_is_refused_and_not_counted_to_its_end(
    here: LiveServer, asked: dict[str, object]
) -> None:
    refused = here.post("/tokenize", {"model": "oracle", **asked})
    assert (refused.status, refused.json.get("count")) == (400, None)
    assert refused.code == "context_length_exceeded"
