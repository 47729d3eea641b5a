"""Runs llama.cpp in a separate process and environment, with the same JSON lines as `openvino_worker.py`.

in    {"prompts": [[token ids], ...], "max_tokens": 64}
out   {"seconds": 1.2, "first_s": 0.4, "output_tokens": 512}

Prompts are computed in batches of the default size; then all sequences decode in one batch with its greedy sampler.
"""

import json
import sys
import time
from typing import Any

SEQUENCE_TOKENS = 1024
"""The longest sequence."""


class Engine:
    """A model and its context, with llama.cpp's defaults except the numbers of threads and sequences."""

    def __init__(self, model: str, num_threads: int, num_sequences: int) -> None:
        import llama_cpp  # type: ignore[import-not-found] # noqa: PLC0415 - only in the peer's environment

        self._lib: Any = llama_cpp
        llama_cpp.llama_backend_init()
        loaded = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = SEQUENCE_TOKENS * num_sequences, num_sequences
        params.n_threads = params.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(loaded, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._max_batch_tokens = int(params.n_batch)
        self._batch = llama_cpp.llama_batch_init(self._max_batch_tokens, 0, 1)
        self._sampler = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(self._sampler, llama_cpp.llama_sampler_init_greedy())

    def answer(self, prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
        """Answer all prompts concurrently."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        started_s = time.perf_counter()
        last = self._read(prompts)
        first_s = time.perf_counter() - started_s
        for step in range(max_tokens - 1):
            places = [(token, len(prompts[sequence]) + step, sequence, True) for sequence, token in enumerate(last)]
            last = [token for _, token in self._compute(places)]
        seconds = time.perf_counter() - started_s
        return {"seconds": seconds, "first_s": first_s, "output_tokens": len(prompts) * max_tokens}

    def _read(self, prompts: list[list[int]]) -> list[int]:
        """Compute the prompts, and return the first token of every answer."""
        places = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        tokens: dict[int, int] = {}
        for first in range(0, len(places), self._max_batch_tokens):
            tokens |= dict(self._compute(places[first : first + self._max_batch_tokens]))
        return [tokens[sequence] for sequence in range(len(prompts))]

    def _compute(self, places: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Compute rows (token, position, sequence, is_last) in one call; return sequence and token of the last ones."""
        batch = self._batch
        batch.n_tokens = len(places)
        for row, (token, position, sequence, is_last) in enumerate(places):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, is_last
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        if self._lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError(f"llama.cpp failed to compute a batch of {len(places)} tokens")
        return [
            (sequence, self._lib.llama_sampler_sample(self._sampler, self._context, row))
            for row, (_, _, sequence, is_last) in enumerate(places)
            if is_last
        ]


def main(model: str, num_threads: int, num_sequences: int) -> None:
    """Load the file, report it, and answer until the pipe is closed."""
    engine = Engine(model, num_threads, num_sequences)
    _answer({"ready": True})
    for line in sys.stdin:
        ask = json.loads(line)
        _answer(engine.answer(ask["prompts"], ask["max_tokens"]))


def _answer(fields: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
