"""A batch of KV events as quire, vLLM and others publish it: msgpack, [timestamp in seconds, events, ...].

    {"type": "BlockStored", "block_hashes": [...], ...}      an event as a map
    ["BlockStored", [...], ...]                              the same event as an array: fields by position

Hashes are integers or bytes, depending on the publisher. Events of unknown types are skipped. Malformed bytes raise
`MessageError` and no other exception.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from quire.errors import MessageError

MEDIUM = "GPU"
"""The `medium` of events about the primary KV cache, as vLLM publishes it."""
MAX_BATCH_BYTES = 4 << 20
"""Maximum size of a batch: enough for a step that computes 128,000 tokens."""
MAX_EVENTS, MAX_EVENT_BYTES = 10_000, 1 << 19
"""Limits per batch and per event: opening such a batch or parsing such an event takes up to 12 ms of CPU time."""
BlockHash = int | Annotated[bytes, msgspec.Meta(max_length=64)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 20)]


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Consecutive blocks of one prefix that can now be hit in the cache."""

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    adapter: str
    cache_group: str


class RemovedBlocks(msgspec.Struct):
    """Blocks that can no longer be hit in the cache."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class ClearedBlocks(msgspec.Struct):
    """The whole cache was cleared."""


ReceivedEvent = StoredRun | RemovedBlocks | ClearedBlocks


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """The cache changes of one step of a member."""

    at_s: float
    """Time of the step, on the member's clock."""
    events: Sequence[msgspec.Raw]
    """Encoded events. `read_kv_event` parses them one at a time, because parsing all at once may take long."""


class _Stored(msgspec.Struct):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[_Token]
    block_size: _Size
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class _StoredMap(_Stored, tag="BlockStored"):
    cache_salt: str | None = None


class _StoredArray(_Stored, tag="BlockStored", array_like=True):
    pass


class _RemovedMap(RemovedBlocks, tag="BlockRemoved"):
    pass


class _RemovedArray(RemovedBlocks, tag="BlockRemoved", array_like=True):
    pass


class _ClearedMap(ClearedBlocks, tag="AllBlocksCleared"):
    pass


class _ClearedArray(ClearedBlocks, tag="AllBlocksCleared", array_like=True):
    pass


class _Batch(msgspec.Struct, array_like=True):
    at_s: float
    events: msgspec.Raw


_KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_batch = msgspec.msgpack.Decoder(_Batch)
_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_anything = msgspec.msgpack.Decoder()
_events = msgspec.msgpack.Decoder(list[msgspec.Raw])


def open_batch(data: bytes) -> KVEventBatch:
    """Decode a batch, but not yet its events. Raises MessageError."""
    try:
        batch = _batch.decode(data)
        if (num_events := _num_of(batch.events)) > MAX_EVENTS:
            rule = f"expected a batch of up to {MAX_EVENTS} KV events, got {num_events}"
            raise MessageError(rule, code="too_many_events")
        return KVEventBatch(batch.at_s, _events.decode(batch.events))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"malformed batch of KV events ({len(data)} bytes): {error}") from error


def _num_of(array: msgspec.Raw) -> int:
    """Return the array length from its msgpack header; 0 if `array` is not an array."""
    head = bytes(memoryview(array)[:5])
    if head[:1] in (b"\xdc", b"\xdd"):
        return int.from_bytes(head[1 : 3 if head[:1] == b"\xdc" else 5], "big")
    return head[0] & 0x0F if b"\x90" <= head[:1] <= b"\x9f" else 0


def read_kv_event(raw: msgspec.Raw) -> ReceivedEvent | None:
    """Parse an event; return None if it does not affect prefix hits in the primary KV cache. Raises MessageError."""
    num_bytes = len(memoryview(raw))
    if num_bytes > MAX_EVENT_BYTES:
        raise MessageError(f"expected a KV event of up to {MAX_EVENT_BYTES} bytes, got {num_bytes}")
    try:
        return _event(raw)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"malformed KV event ({num_bytes} bytes): {error}") from error


def _event(raw: msgspec.Raw) -> ReceivedEvent | None:
    try:
        event = (_map if _is_map(bytes(memoryview(raw)[:1])) else _array).decode(raw)
    except msgspec.ValidationError:
        if _is_of_another_kind(raw):
            return None
        raise
    if isinstance(event, _Stored):
        return _stored(event)
    return event if isinstance(event, ClearedBlocks) or _counts(event) else None


def _is_map(first: bytes) -> bool:
    return first[:1] in (b"\xde", b"\xdf") or b"\x80" <= first <= b"\x8f"


def _is_of_another_kind(raw: msgspec.Raw) -> bool:
    event = _anything.decode(raw)
    kind = event.get("type") if isinstance(event, dict) else event[0] if isinstance(event, list) and event else None
    return isinstance(kind, str) and kind not in _KINDS


def _counts(event: _Stored | RemovedBlocks) -> bool:
    """Whether an event is about the primary KV cache (not offload media) and the first group of layers."""
    return (event.medium or MEDIUM).upper() == MEDIUM and not event.group_idx


def _stored(event: _Stored) -> StoredRun | None:
    num_blocks = len(event.block_hashes)
    if len(event.token_ids) != num_blocks * event.block_size:
        raise ValueError(
            f"{num_blocks} blocks of {event.block_size} tokens have {num_blocks * event.block_size} tokens, "
            f"{len(event.token_ids)} came"
        )
    if not _counts(event) or not num_blocks:
        return None
    adapter = event.lora_name or ("" if event.lora_id is None else f"number {event.lora_id}")
    keys = event.extra_keys or []
    salt = event.cache_salt if isinstance(event, _StoredMap) else None
    group = _group_of(keys[0] if keys else None, adapter) if salt is None else salt
    if group is None:
        return None
    num_plain = _num_plain(keys, num_blocks)
    return StoredRun(
        event.block_hashes[:num_plain],
        event.parent_block_hash,
        event.token_ids[: num_plain * event.block_size],
        event.block_size,
        adapter,
        group,
    )


def _group_of(keys: Sequence[Any] | None, adapter: str) -> str | None:
    """Return the cache group (isolation key, vLLM's cache salt) that was hashed into a first block in addition to the
    adapter; "" if there is none, None if the block has other extra keys."""
    others = [key for key in keys or () if key != adapter]
    if not others:
        return ""
    return others[0] if len(others) == 1 and isinstance(others[0], str) else None


def _num_plain(keys: Sequence[Sequence[Any] | None], num_blocks: int) -> int:
    """Count the leading blocks that their tokens identify: up to the first with other content, such as an image."""
    for at, of_block in enumerate(keys[:num_blocks]):
        if of_block and not all(isinstance(key, str) for key in of_block):
            return at
    return num_blocks
