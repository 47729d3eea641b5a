"""A runner without tensors that detects every wrong block.

Each KV slot stores a 64-bit hash of its token, its position and the preceding slot, which is read *through the block
table*. The next token is a hash of all preceding slots, read the same way, and of the sampling parameters. A stale,
aliased, unwritten or foreign block, a position off by one, a wrong seed or a lost penalty therefore changes the
generated tokens at once. A real model would expose such a bug only by chance; with this runner a comparison for
equality finds it.

If the capacity has state slots (recurrent layers), the runner also keeps a state per sequence: a hash over all tokens
fed, stored in a state slot and mixed into the next token. A wrong slot gives a wrong token.

`answer_alone` computes the same tokens without blocks, batches or caches: the expected output of every request.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from msgspec.structs import replace

from quire.backends.acceptance import accepted_tokens, masks_of
from quire.backends.protocol import Capacity, PendingStep
from quire.core.request import ResolvedSampling
from quire.core.step import (
    NO_MASKS,
    NO_TOKEN_LEFT,
    Masks,
    RowResult,
    Sampling,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WorkItem,
)
from quire.errors import InvariantError

SLOT_BYTES = 8
HIDDEN_BYTES = 32
U64_MASK = (1 << 64) - 1


def slot_value(previous: int, token_id: int, position: int) -> int:
    """Return the value of the slot at `position`, computed from the value of the preceding slot."""
    value = (previous ^ (token_id * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9)) & U64_MASK
    value = (value ^ value >> 29) * 0xBF58476D1CE4E5B9 & U64_MASK
    return value ^ value >> 32


def state_value(previous: int, token_id: int, position: int) -> int:
    """Return the recurrent state after one more token: a hash like a KV slot's, with a salt so that they differ."""
    return slot_value(previous ^ 0x5DEECE66D1CE4E5B, token_id, position)


@lru_cache(maxsize=4096)
def _encode_params(params: ResolvedSampling) -> bytes:
    # Greedy by temperature and greedy by top-k are equivalent.
    is_greedy = params.temperature == 0.0 or params.top_k == 1
    return repr(replace(params, temperature=0.0, top_k=0) if is_greedy else params).encode()


def next_token(context: bytes, sampling: Sampling, vocabulary_size: int, mask: bytes | None = None) -> int | None:
    """Return the token that follows this context (slots and state): a pure function of the context and of everything
    that sampling may depend on. None if no token is allowed."""
    params = sampling.params
    is_greedy = params.temperature == 0.0 or params.top_k == 1
    hash_state = blake2b(context, digest_size=8)
    hash_state.update(_encode_params(params))
    hash_state.update(repr((sampling.num_prompt_tokens, sampling.known_tokens)).encode())
    if not is_greedy:
        hash_state.update(repr((sampling.seed, sampling.sequence_index, sampling.position)).encode())
    candidates = range(vocabulary_size) if params.allowed_token_ids is None else params.allowed_token_ids
    start = int.from_bytes(hash_state.digest(), "little")
    for attempt in range(len(candidates)):
        token_id = candidates[(start + attempt) % len(candidates)]
        is_too_early = sampling.num_output_tokens < params.min_tokens and token_id in params.stop_token_ids
        is_masked = mask is not None and not mask[token_id // 8] >> token_id % 8 & 1
        if not is_too_early and not is_masked and token_id not in params.banned_token_ids:
            return token_id
    return None


def answer_alone(
    prompt: Sequence[int],
    params: ResolvedSampling,
    seed: int,
    vocabulary_size: int,
    sequence_index: int = 0,
    *,
    has_state: bool = False,
) -> list[int]:
    """Return the oracle's output for a request that runs alone: no blocks, no chunks, no cache."""
    slots, tokens, value, state = array("Q"), list(prompt), 0, 0
    for position, prompt_token in enumerate(tokens):
        value = slot_value(value, prompt_token, position)
        state = state_value(state, prompt_token, position)
        slots.append(value)
    while len(tokens) - len(prompt) < params.max_tokens:
        known_tokens = tuple(tokens) if params.needs_known_tokens else None
        sampling = Sampling(params, seed, sequence_index, len(tokens), len(prompt), known_tokens)
        context = slots.tobytes() + (state.to_bytes(SLOT_BYTES, "little") if has_state else b"")
        token_id = next_token(context, sampling, vocabulary_size)
        if token_id is None:
            break
        tokens.append(token_id)
        if len(tokens) - len(prompt) > params.min_tokens and token_id in params.stop_token_ids:
            break
        value = slot_value(value, token_id, len(tokens) - 1)
        state = state_value(state, token_id, len(tokens) - 1)
        slots.append(value)
    return tokens[len(prompt) :]


class OracleRunner:
    """A runner that imitates a model. New slots contain invalid values, so a read of an unwritten slot is detected."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        size = capacity.block_size
        self._blocks = [
            array("Q", [slot_value(0xDEAD, block, offset) for offset in range(size)])
            for block in range(capacity.num_blocks + 1)
        ]
        self.states = [0, *(slot_value(0xBAD, slot, 0) for slot in range(1, capacity.num_slots + 1))]
        """Value of each state slot. Tests write to it to inject faults."""
        self._states_after: dict[int, list[int]] = {}
        """Sequence id -> the state after each token that the step feeds to it."""
        self._is_closed = False

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def start(self, plan: StepPlan) -> PendingStep:
        """Return a step that computes in `wait`."""
        return _OracleStep(self, plan)

    def run(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        """Run a step: block and slot copies first, then all rows, then copies of the states to cache."""
        if self._is_closed:
            raise InvariantError("the runner is closed", code="runner_is_closed")
        num_tokens, limit = sum(len(item.token_ids) for item in plan.items), self._capacity.max_step_tokens
        if num_tokens > limit:
            raise InvariantError(f"expected at most {limit} tokens in a step, got {num_tokens}", code="step_too_large")
        self._check_writes(plan)
        for copy in plan.copies:
            self._blocks[copy.dst] = self._blocks[copy.src][:]
        for slot_copy in plan.slot_copies:
            self.states[slot_copy.dst] = self.states[slot_copy.src]
        for item in plan.items:
            self._write_slots(item)
        if self._capacity.num_slots:
            self._states_after = {item.sequence_id: self._advance_state(item) for item in plan.items}
        for slot_copy in plan.cache_copies:
            self.states[slot_copy.dst] = self.states[slot_copy.src]
        return StepResult(plan.step, {item.sequence_id: self._compute_row(item, masks) for item in plan.items})

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Return each block as its slots, 8 bytes each in the machine's byte order."""
        return [self._blocks[block].tobytes() for block in block_ids]

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[bytes]) -> None:
        for block, content in zip(block_ids, data, strict=True):
            self._blocks[block] = array("Q", content)

    def close(self) -> None:
        self._is_closed = True
        self._blocks = []

    def _check_writes(self, plan: StepPlan) -> None:
        """Raise InvariantError if a block written by one row in this step is written or read by another row."""
        size = self._capacity.block_size
        writer: dict[int, int] = {}
        for item in plan.items:
            first, last = item.first_position // size, (item.first_position + len(item.token_ids) - 1) // size
            for block in item.block_ids[first : last + 1]:
                if writer.setdefault(block, item.sequence_id) != item.sequence_id:
                    raise InvariantError(f"block {block} is written by two rows in a step", code="block_written_twice")
        for item in plan.items:
            for block in item.block_ids:
                if writer.get(block, item.sequence_id) != item.sequence_id:
                    raise InvariantError(f"block {block} is written by one row and read by another in one step")

    def _write_slots(self, item: WorkItem) -> None:
        size, blocks, table = self._capacity.block_size, self._blocks, item.block_ids
        position = item.first_position
        value = blocks[table[(position - 1) // size]][(position - 1) % size] if position else 0
        for token_id in item.token_ids:
            value = slot_value(value, token_id, position)
            blocks[table[position // size]][position % size] = value
            position += 1

    def _advance_state(self, item: WorkItem) -> list[int]:
        """Return the state after each token of the item; the last one is also stored in the item's slot."""
        if not 0 < item.state_slot <= self._capacity.num_slots:
            message = f"expected a state slot from 1 to {self._capacity.num_slots} for sequence {item.sequence_id}"
            raise InvariantError(f"{message}, got {item.state_slot}")
        state, states = self.states[item.state_slot], []
        for position, token_id in enumerate(item.token_ids, item.first_position):
            state = state_value(state, token_id, position)
            states.append(state)
        self.states[item.state_slot] = state
        return states

    def _compute_row(self, item: WorkItem, masks: Masks) -> RowResult:
        hidden = tuple(self._hidden_state(item, position) for position in item.hidden_positions)
        if item.sampling is None:
            return RowResult((), (), self._scores(item), hidden)
        size = self._capacity.vocabulary_size
        rows = zip(item.samplings(), masks_of(masks, item, size), strict=True)
        choices = (next_token(self._context(item, sampling.position), sampling, size, mask) for sampling, mask in rows)
        tokens = accepted_tokens(item.drafts, choices)
        if not tokens:
            return RowResult(error=NO_TOKEN_LEFT)
        return RowResult(tokens, self._chosen_logprobs(item, item.sampling, tokens), self._scores(item), hidden)

    def _chosen_logprobs(self, item: WorkItem, sampling: Sampling, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        num_alternatives = sampling.params.logprobs
        if num_alternatives is None:
            return ()
        return tuple(
            self._logprobs(self._context(item, position), token_id, num_alternatives)
            for position, token_id in enumerate(tokens, sampling.position)
        )

    def _scores(self, item: WorkItem) -> tuple[TokenLogprobs, ...]:
        scoring = item.scoring
        if scoring is None:
            return ()
        first, token_ids = scoring.first_position, scoring.token_ids
        slots = self._kv_bytes(item, first + len(token_ids) - 1)
        return tuple(
            self._logprobs(
                slots[: SLOT_BYTES * length] + self._state_bytes(item, length), token_id, scoring.num_alternatives
            )
            for length, token_id in enumerate(token_ids, first)
        )

    def _hidden_state(self, item: WorkItem, position: int) -> bytes:
        return blake2b(self._context(item, position + 1), digest_size=HIDDEN_BYTES).digest()

    def _context(self, item: WorkItem, length: int) -> bytes:
        """Return everything that the token at position `length` may depend on: the KV slots and the state."""
        return self._kv_bytes(item, length) + self._state_bytes(item, length)

    def _kv_bytes(self, item: WorkItem, length: int) -> bytes:
        """Return the sequence's first `length` slots, read through its block table, and no later slot."""
        num_blocks = -(-length // self._capacity.block_size)
        joined = b"".join([self._blocks[block].tobytes() for block in item.block_ids[:num_blocks]])
        return joined[: length * SLOT_BYTES]

    def _state_bytes(self, item: WorkItem, length: int) -> bytes:
        """Return the recurrent state after `length` tokens; empty for a model without recurrent layers."""
        if not self._capacity.num_slots:
            return b""
        return self._states_after[item.sequence_id][length - 1 - item.first_position].to_bytes(SLOT_BYTES, "little")

    def _logprobs(self, context: bytes, token_id: int, num_alternatives: int) -> TokenLogprobs:
        digest = blake2b(context, digest_size=8, salt=token_id.to_bytes(8, "little")).digest()
        logprob = -int.from_bytes(digest, "little") / 2.0**60
        size = self._capacity.vocabulary_size
        alternatives = tuple(((token_id + 1 + rank) % size, logprob - 1.0 - rank) for rank in range(num_alternatives))
        return TokenLogprobs(token_id, logprob, 1, alternatives)


class _OracleStep:
    def __init__(self, runner: OracleRunner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan

    def wait(self, masks: Masks = NO_MASKS) -> StepResult:
        return self._runner.run(self._plan, masks)
