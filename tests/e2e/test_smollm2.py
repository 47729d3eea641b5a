"""The real model through the real scheduler."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.test_model import smollm2
from quire.backends.protocol import Runner
from quire.core.request import ResolvedSampling
from tests.support.machine.process_memory import AMPLE_BYTES, kept_for_this_file
from tests.support.models.models import Ask, Machine, load_runner

pytestmark = pytest.mark.model


@kept_for_this_file
def runner() -> Runner:
    return load_runner(smollm2().directory, memory_bytes=AMPLE_BYTES, max_sequence_tokens=1024, max_running=16)


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(smollm2().tokenizer_file))


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text).ids
    return ids


def test_the_capital_of_france_is_paris() -> None:
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    stop = ResolvedSampling(temperature=0.0, max_tokens=20, stop_token_ids=smollm2().eos_token_ids)
    ask = Machine(runner()).alone(Ask(encode(question), stop))
    assert tokenizer().decode(ask.tokens) == "The capital of France is Paris."


def test_greedy_tokens_are_those_of_transformers() -> None:
    texts = ["Once upon a time", "def fibonacci(n):\n", "The three laws of thermodynamics are " * 12]
    params = ResolvedSampling(temperature=0.0, max_tokens=16)
    asks = Machine(runner()).run([Ask(encode(text), params) for text in texts])
    reference: Any = AutoModelForCausalLM.from_pretrained(smollm2().directory, dtype=torch.float32).eval()
    for ask in asks:
        ids = torch.tensor([ask.prompt])
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16,
                                 eos_token_id=None)  # fmt: skip
        assert out[0, ids.shape[1] :].tolist() == ask.tokens


def test_a_second_request_finds_the_prefix_of_the_first() -> None:
    machine, text = Machine(runner()), encode("A long story about a lighthouse keeper and the sea. " * 12)
    params = ResolvedSampling(temperature=0.0, max_tokens=8)
    cold = machine.alone(Ask(text, params))
    warm = machine.alone(Ask(text, params))
    assert warm.tokens == cold.tokens
    assert warm.num_cached_tokens == (len(text) - 1) // 32 * 32
