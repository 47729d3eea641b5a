"""Log-probabilities of prompts: found row by row, worded once for each answer, and of any size."""

from typing import Any

import numpy as np
import pytest

from quire.backends.host import sampler
from quire.text.tokenizer import Tokenizer
from tests.support.servers.local_api import house

VOCABULARY = 4_096


class CountedNumpy:
    """numpy, and how often it is asked for something."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        self.num_calls += 1
        return getattr(np, name)


def calls_for(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> int:
    logits = np.random.default_rng(1).standard_normal((num_rows, VOCABULARY), np.float32)
    counted = CountedNumpy()
    monkeypatch.setattr(sampler, "np", counted)
    found = sampler._likeliest_tokens(logits, 20)
    monkeypatch.undo()
    assert [len(one) for one in found] == [20] * num_rows
    return counted.num_calls


def test_alternatives_of_all_rows_are_found_in_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_for(64, monkeypatch) == calls_for(2, monkeypatch)


def asked(prompts: list[list[int]], n: int) -> dict[str, Any]:
    return {"model": "oracle", "prompt": prompts, "n": n, "echo": True, "logprobs": 20, "max_tokens": 1}


def test_an_answer_of_hundreds_of_thousands_of_logprobs_is_refused_before_it_runs() -> None:
    with house() as here:
        reply = here.post("/v1/completions", asked([[7] * 250] * 16, n=8))
        assert reply.status == 400
        message = reply.json["error"]["message"]
        assert str(8 * 16 * (250 + 1) * 21) in message
        assert "fewer" in message
        assert here.post("/v1/completions", asked([[7] * 250], n=1)).status == 200


def test_the_logprobs_of_a_prompt_are_worded_once_for_all_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    num_named = 0
    named = Tokenizer.token_bytes

    def counted(self: Tokenizer, token_id: int, **more: Any) -> bytes:
        nonlocal num_named
        num_named += 1
        return named(self, token_id, **more)

    monkeypatch.setattr(Tokenizer, "token_bytes", counted)
    counts = []
    with house() as here:
        for n in (1, 8):
            num_named = 0
            reply = here.post("/v1/completions", asked([[7] * 100], n=n))
            assert [len(choice["logprobs"]["tokens"]) for choice in reply.json["choices"]] == [101] * n
            counts.append(num_named)
    assert counts[1] < 2 * counts[0]
