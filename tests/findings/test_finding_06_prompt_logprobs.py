"""Log-probabilities of prompts: found row by row, worded once for each answer, and of any size."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.backends.torch.sampler import logprobs_of
from quire.text.tokenizer import Tokenizer
from tests.support.local_api import house

VOCABULARY = 4_096


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How often torch is asked for something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def calls_for(num_rows: int) -> int:
    logits = torch.randn(num_rows, VOCABULARY, generator=torch.Generator().manual_seed(1))
    counted = Counted()
    with counted:
        reports = logprobs_of(logits, [3] * num_rows, [20] * num_rows)
    assert [len(report.alternatives) for report in reports] == [20] * num_rows
    return counted.num_calls


def test_alternatives_of_all_rows_are_found_in_one_operation() -> None:
    assert calls_for(64) == calls_for(2)


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
