"""Converts an assignment to requests of the OpenAI API: `/v1/completions` with token ids. Pure logic, no I/O.

Every answer (choice) is a separate HTTP request, so that the gateway can cancel one by closing its connection. After a
move, an answer continues with prompt plus produced tokens as its prompt, the remaining token limits and the same seed.
The continuation is not exact: the server's random state restarts, and its penalties count produced tokens as prompt.

Parameters beyond the OpenAI API are vLLM's. All sampling parameters are sent, because the server would replace missing
ones by the model's defaults.
"""

from typing import Any

from quire.core.request import Continuation, ResolvedSampling
from quire.engine.commands import Restore, Submit

SEED_MASK = (1 << 63) - 1
"""Keeps seeds in 63 bits, because vLLM's are signed and -1 means no seed."""
NO_TOP_K = -1


def missing_feature(params: ResolvedSampling, grammar: str | None, adapter: str) -> str | None:
    """Return the feature that the request needs and OpenAI members lack, in words for an error; None if none."""
    if grammar is not None:
        return "a grammar (for tools or a schema)"
    if params.prompt_logprobs is not None or params.max_tokens < 1:
        return "log-probabilities of the prompt"
    if params.banned_token_ids:
        return "banned tokens"
    return "an adapter" if adapter else None


def completion_body(
    command: Submit | Restore, answer: Continuation, model: str, max_sequence_tokens: int
) -> dict[str, Any]:
    """Return the request body for one answer."""
    params = command.params
    prompt = [*command.prompt, *answer.produced]
    num_left = max(1, min(params.max_tokens - len(answer.produced), max_sequence_tokens - len(prompt)))
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "add_special_tokens": False,
        "max_tokens": num_left,
        "min_tokens": min(num_left, max(0, params.min_tokens - len(answer.produced))),
        "temperature": params.temperature,
        "top_k": params.top_k or NO_TOP_K,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": (command.seed + answer.index) & SEED_MASK,
        # The gateway has resolved the stop tokens; the server's own EOS tokens may differ.
        "ignore_eos": True,
        "stop_token_ids": sorted(params.stop_token_ids),
    }
    if command.namespace.cache_group:
        body["cache_salt"] = command.namespace.cache_group
    if params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    if params.allowed_token_ids is not None:
        body["allowed_token_ids"] = list(params.allowed_token_ids)
    if params.logprobs is not None:
        body["logprobs"] = params.logprobs
        body["return_tokens_as_token_ids"] = True
    return body
