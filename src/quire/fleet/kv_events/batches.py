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
"""Limits of a batch and of an event: decoding the largest batch or event takes up to 12 ms of CPU time."""
BlockHash = int | Annotated[bytes, msgspec.Meta(max_length=64)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 20)]


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Consecutive blocks of one prefix that are now in the cache."""

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    adapter: str
    cache_group: str


class RemovedBlocks(msgspec.Struct):
    """Blocks that are no longer in the cache."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class ClearedBlocks(msgspec.Struct):
    """The whole cache was cleared."""


ReceivedEvent = StoredRun | RemovedBlocks | ClearedBlocks


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """The cache changes of one step of a member."""

    time_s: float
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
    time_s: float
    events: msgspec.Raw


_TYPES = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_batch_decoder = msgspec.msgpack.Decoder(_Batch)
_map_decoder = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_array_decoder = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_any_decoder = msgspec.msgpack.Decoder()
_events_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])


def open_batch(data: bytes) -> KVEventBatch:
    """Decode a batch, but not yet its events. Raises MessageError."""
    try:
        batch = _batch_decoder.decode(data)
        if (num_events := _array_length(batch.events)) > MAX_EVENTS:
            message = f"expected a batch of up to {MAX_EVENTS} KV events, got {num_events}"
            raise MessageError(message, code="too_many_events")
        return KVEventBatch(batch.time_s, _events_decoder.decode(batch.events))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"malformed batch of KV events ({len(data)} bytes): {error}") from error


def _array_length(array: msgspec.Raw) -> int:
    """Return the array length from its msgpack header; 0 if `array` is not an array."""
    header = bytes(memoryview(array)[:5])
    if header[:1] in (b"\xdc", b"\xdd"):
        return int.from_bytes(header[1 : 3 if header[:1] == b"\xdc" else 5], "big")
    return header[0] & 0x0F if b"\x90" <= header[:1] <= b"\x9f" else 0


def read_kv_event(raw: msgspec.Raw) -> ReceivedEvent | None:
    """Parse an event; return None if it does not affect prefix hits in the primary KV cache. Raises MessageError."""
    num_bytes = len(memoryview(raw))
    if num_bytes > MAX_EVENT_BYTES:
        raise MessageError(f"expected a KV event of up to {MAX_EVENT_BYTES} bytes, got {num_bytes}")
    try:
        return _parse_event(raw)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"malformed KV event ({num_bytes} bytes): {error}") from error


def _parse_event(raw: msgspec.Raw) -> ReceivedEvent | None:
    try:
        event = (_map_decoder if _is_map(bytes(memoryview(raw)[:1])) else _array_decoder).decode(raw)
    except msgspec.ValidationError:
        if _has_unknown_type(raw):
            return None
        raise
    if isinstance(event, _Stored):
        return _stored_run(event)
    return event if isinstance(event, ClearedBlocks) or _is_relevant(event) else None


def _is_map(first_byte: bytes) -> bool:
    return first_byte[:1] in (b"\xde", b"\xdf") or b"\x80" <= first_byte <= b"\x8f"


def _has_unknown_type(raw: msgspec.Raw) -> bool:
    event = _any_decoder.decode(raw)
    tag = event.get("type") if isinstance(event, dict) else event[0] if isinstance(event, list) and event else None
    return isinstance(tag, str) and tag not in _TYPES


def _is_relevant(event: _Stored | RemovedBlocks) -> bool:
    """Whether an event is about the primary KV cache (not offload media) and the first group of layers."""
    return (event.medium or MEDIUM).upper() == MEDIUM and not event.group_idx


def _stored_run(event: _Stored) -> StoredRun | None:
    num_blocks = len(event.block_hashes)
    if len(event.token_ids) != num_blocks * event.block_size:
        raise ValueError(
            f"expected {num_blocks * event.block_size} tokens in {num_blocks} blocks of {event.block_size} tokens, "
            f"got {len(event.token_ids)}"
        )
    if not _is_relevant(event) or not num_blocks:
        return None
    adapter = event.lora_name or ("" if event.lora_id is None else f"number {event.lora_id}")
    keys = event.extra_keys or []
    salt = event.cache_salt if isinstance(event, _StoredMap) else None
    cache_group = _cache_group_of(keys[0] if keys else None, adapter) if salt is None else salt
    if cache_group is None:
        return None
    num_text_blocks = _num_text_blocks(keys, num_blocks)
    return StoredRun(
        event.block_hashes[:num_text_blocks],
        event.parent_block_hash,
        event.token_ids[: num_text_blocks * event.block_size],
        event.block_size,
        adapter,
        cache_group,
    )


def _cache_group_of(keys: Sequence[Any] | None, adapter: str) -> str | None:
    """Return the cache group (vLLM: cache salt) from the extra keys of a first block, which may also have the adapter;
    "" if there is no cache group, None if there are other extra keys."""
    other_keys = [key for key in keys or () if key != adapter]
    if not other_keys:
        return ""
    return other_keys[0] if len(other_keys) == 1 and isinstance(other_keys[0], str) else None


def _num_text_blocks(keys: Sequence[Sequence[Any] | None], num_blocks: int) -> int:
    """Count the leading blocks with only text, which their tokens identify; other blocks may contain images."""
    for index, block_keys in enumerate(keys[:num_blocks]):
        if block_keys and not all(isinstance(key, str) for key in block_keys):
            return index
    return num_blocks
