"""Damaged and hostile model files, and what becomes of them.

`mutations` makes them from pristine tiny models, the same for the same seed. `survey` has child processes resolve them,
so that a crash, a hang or a huge allocation is counted and does not end the run.
"""

import importlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors.numpy import load_file

from quire.checkpoints import Checkpoint, CheckpointError, load_tokenizer, resolve
from quire.checkpoints.gguf import file as gguf_file
from quire.checkpoints.gguf.convert import ensure_safetensors
from quire.checkpoints.weights import weight_paths
from tests.support.models.tiny_models import Tiny, make_directory, piece_metadata, write_gguf

SECONDS_PER_FILE = 60.0
ADDRESS_SPACE_BYTES = 4 * 1024**3
NUM_CHILDREN = 2
NUMBERS = [0, 1, 2, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 2**31, 2**63, 2**64, -(2**63), 10**40, 0.5, -0.5, 1e308, "", "x", "\0",
    "é" * 300, "../../x", [], [[]], {}, {"a": 1}, [1, 2], [-1, 5], [None], ["x"], {"content": 3}, {"type": "Nope"},
    {"type": "Sequence"},
]  # fmt: skip
WAYS_OUT = [
    "../model.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "C:\\x.safetensors", "..\\x.safetensors",
    "pytorch_model.bin", "\0.safetensors", "x" * 5000 + ".safetensors", "missing.safetensors", "config.json",
]  # fmt: skip
SPELLINGS = [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"",
    b"\xff",
    b"'x'",
]


@dataclass(frozen=True)
class Mutation:
    """One damaged model: `data` instead of the file `target` of the pristine model `model`."""

    name: str
    model: str
    target: str
    data: bytes


@dataclass
class Survey:
    """What became of the files."""

    num_files: int = 0
    num_refused: int = 0
    num_accepted: int = 0
    slowest_s: float = 0.0
    crashed: list[str] = field(default_factory=list)


def make_pristine(folder: Path) -> Path:
    """Sound models to damage: two GGUF files with either kind of tokenizer, and a directory with two shards."""
    (folder / "bytes").mkdir(parents=True)
    (folder / "pieces").mkdir()
    write_gguf(folder / "bytes" / "model.gguf", Tiny(kind="Q8_0"))
    write_gguf(folder / "pieces" / "model.gguf", Tiny(arch="qwen3", kind="F16", metadata=piece_metadata()))
    make_directory(folder / "directory")
    return folder


def mutations(pristine: Path, seed: int, count: int) -> Iterator[Mutation]:
    """This many damaged models, the same for the same seed."""
    dice = random.Random(seed)
    places = {model: field_places(pristine / model / "model.gguf") for model in ("bytes", "pieces")}
    shards = sorted(path.name for path in (pristine / "directory").glob("*.safetensors"))
    texts = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    for number in range(count):
        model = dice.choice(["bytes", "bytes", "pieces", "directory", "directory", "directory"])
        if model == "directory":
            target = dice.choice(
                [*texts, "model.safetensors.index.json", "model.safetensors.index.json", *shards, *shards]
            )
        else:
            target = "model.gguf"
        data = (pristine / model / target).read_bytes()
        if target.endswith(".gguf"):
            how, damaged = _damage_gguf(dice, data, places[model])
        elif target.endswith(".safetensors"):
            how, damaged = _damage_safetensors(dice, data)
        else:
            how, damaged = _damage_json(dice, data, target)
        yield Mutation(f"seed {seed}, {number}: {model}/{target}, {how}", model, target, damaged)


def write_mutation(pristine: Path, mutation: Mutation, folder: Path) -> Path:
    """Put the damaged model into `folder`; returns what to resolve."""
    folder.mkdir(parents=True)
    for path in (pristine / mutation.model).iterdir():
        if path.is_file() and path.name != mutation.target:
            os.link(path, folder / path.name)
    (folder / mutation.target).write_bytes(mutation.data)
    return folder / mutation.target if mutation.target.endswith(".gguf") else folder


def field_places(path: Path) -> list[tuple[int, int]]:
    """Offset and width of every count, length, dimension, type and offset in a GGUF header."""
    places: list[tuple[int, int]] = []

    class Recording(gguf_file._Reader):
        def u32(self) -> int:
            places.append((self.position, 4))
            return super().u32()

        def u64(self) -> int:
            places.append((self.position, 8))
            return super().u64()

    with mock.patch.object(gguf_file, "_Reader", Recording):
        gguf_file.read_gguf(path)
    return [(4, 4), *places]


def _damage_gguf(dice: random.Random, data: bytes, places: list[tuple[int, int]]) -> tuple[str, bytes]:
    header_bytes = places[-1][0] + 8
    # The last places are those of tensors, the first those of counts: vocabularies between them would drown both.
    chosen = dice.choice([places[:60], places[-80:], places])
    offset, width = dice.choice(chosen)
    match dice.randrange(4):
        case 0:
            number = dice.choice([*NUMBERS, len(data), dice.getrandbits(64)]) % 256**width
            return f"field at {offset} = {number}", _put(data, offset, number.to_bytes(width, "little"))
        case 1:
            old = int.from_bytes(data[offset : offset + width], "little")
            number = (old + dice.choice([-32, -2, -1, 1, 2, 32])) % 256**width
            return f"field at {offset} = {old} becomes {number}", _put(data, offset, number.to_bytes(width, "little"))
        case 2:
            other, _ = dice.choice([place for place in chosen if place[1] == width])
            swapped = _put(data, offset, data[other : other + width])
            return f"fields at {offset} and {other} swapped", _put(swapped, other, data[offset : offset + width])
        case _:
            return _damage_bytes(dice, data, dice.choice([header_bytes, len(data)]))


def _damage_safetensors(dice: random.Random, data: bytes) -> tuple[str, bytes]:
    header_bytes = struct.unpack_from("<Q", data)[0]
    match dice.randrange(4):
        case 0:
            number = dice.choice([*NUMBERS, len(data), len(data) - 8, header_bytes + 1, header_bytes - 1])
            return f"header length {number}", struct.pack("<Q", number) + data[8:]
        case 1:
            return _damage_bytes(dice, data, dice.choice([8 + header_bytes, len(data)]))
        case 2:
            header = json.loads(data[8 : 8 + header_bytes])
            first, second = dice.sample([name for name in header if name != "__metadata__"], 2)
            part = dice.choice(["data_offsets", "shape", "dtype"])
            header[first][part], header[second][part] = header[second][part], header[first][part]
            how, raw = f"{part} of {first} and {second} swapped", json.dumps(header).encode()
        case _:
            how, raw = _damage_json(dice, data[8 : 8 + header_bytes], "header")
    return how, struct.pack("<Q", len(raw)) + raw + data[8 + header_bytes :]


def _damage_json(dice: random.Random, data: bytes, target: str) -> tuple[str, bytes]:
    value = json.loads(data)
    nodes = _nodes(value)
    if target.endswith("index.json") and dice.random() < 0.5:
        name = dice.choice(list(value["weight_map"]))
        value["weight_map"][name] = dice.choice(WAYS_OUT)
        return f"{name} in {value['weight_map'][name][:40]!r}", json.dumps(value).encode()
    holder, key = dice.choice(nodes[:200] if dice.random() < 0.7 else nodes)
    match dice.randrange(6):
        case 0 | 1:
            holder[key] = dice.choice(VALUES)
            return f"{key!r} = {str(holder[key])[:40]!r}", json.dumps(value).encode()
        case 2:
            del holder[key]
            return f"{key!r} removed", json.dumps(value).encode()
        case 3:
            spelling = dice.choice(SPELLINGS)
            holder[key] = "THE PLACE"
            return f"{key!r} spelt {spelling[:20]!r}", json.dumps(value).encode().replace(b'"THE PLACE"', spelling)
        case 4:
            raw = json.dumps(value).encode()
            return "a key twice", raw[:-1] + b", " + raw[1:] if len(raw) > 2 else raw
        case _:
            return _damage_bytes(dice, data, len(data))


def _damage_bytes(dice: random.Random, data: bytes, limit: int) -> tuple[str, bytes]:
    """Flip, cut, add, blank or repeat bytes among the first `limit`."""
    place = dice.randrange(limit)
    length = dice.choice([1, 4, 8, 64])
    match dice.randrange(6):
        case 0 | 1:
            return f"bit {place} flipped", _put(data, place, bytes([data[place] ^ 1 << dice.randrange(8)]))
        case 2:
            return f"cut at {place}", data[:place]
        case 3:
            return f"{length} bytes added at {place}", data[:place] + dice.randbytes(length) + data[place:]
        case 4:
            return f"{length} bytes at {place} all ones", _put(data, place, b"\xff" * length)[: len(data)]
        case _:
            return f"{length} bytes removed at {place}", data[:place] + data[place + length :]


def _put(data: bytes, offset: int, part: bytes) -> bytes:
    return data[:offset] + part + data[offset + len(part) :]


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value, outermost first, as the holder and the key in it."""
    found: list[tuple[Any, Any]] = []
    level = [value]
    while level:
        below = []
        for holder in level:
            items = holder.items() if isinstance(holder, dict) else enumerate(holder)
            for key, item in items:
                found.append((holder, key))
                if isinstance(item, dict | list):
                    below.append(item)
        level = below
    return found


def open_all(checkpoint: Checkpoint) -> None:
    """A loader without tensors: every value read where it lies and by the safetensors library, the tokenizer used."""
    for path in weight_paths(ensure_safetensors(checkpoint)):
        load_file(path)
    if checkpoint.tokenizer_file is not None:
        load_tokenizer(checkpoint.tokenizer_file).encode("hello world 123 <|im_end|>")


def survey(count: int, seed: int, load: str | None = None) -> Survey:
    """Resolve this many damaged models in child processes; `load` ("module:function") is given those accepted."""
    result = Survey()
    scratch = Path(tempfile.mkdtemp(prefix="hostile-"))
    try:
        pristine = make_pristine(scratch / "pristine")
        children = [_Child(load) for _ in range(NUM_CHILDREN)]
        try:
            for number, mutation in enumerate(mutations(pristine, seed, count)):
                child = children[number % NUM_CHILDREN]
                child.settle(result)
                folder = scratch / str(number)
                child.begin(mutation.name, write_mutation(pristine, mutation, folder), folder)
            for child in children:
                child.settle(result)
        finally:
            for child in children:
                child.stop()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return result


class _Child:
    """A long-lived process that resolves one model after another, replaced when it dies or hangs."""

    def __init__(self, load: str | None) -> None:
        self.load = load
        self.job: tuple[str, Path] | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=_resolve_all, args=(far_end, self.load), daemon=True)
        self.process.start()
        far_end.close()
        self.pipe.recv()  # it is ready: what follows is measured without its imports

    def begin(self, name: str, target: Path, folder: Path) -> None:
        self.job = (name, folder)
        self.pipe.send((str(target), str(folder / "cache")))

    def settle(self, result: Survey) -> None:
        """Wait for the model under way and count what became of it."""
        if self.job is None:
            return
        name, folder = self.job
        self.job = None
        verdict, spent_s = self._verdict()
        result.num_files += 1
        result.slowest_s = max(result.slowest_s, spent_s)
        result.num_refused += verdict == "refused"
        result.num_accepted += verdict == "accepted"
        if verdict not in {"refused", "accepted"}:
            result.crashed.append(f"{name}: {verdict}")
        shutil.rmtree(folder, ignore_errors=True)

    def _verdict(self) -> tuple[str, float]:
        """In words, and the processor time it took."""
        try:
            if self.pipe.poll(SECONDS_PER_FILE):
                verdict, spent_s = self.pipe.recv()
                return str(verdict), float(spent_s)
            verdict = f"no answer within {SECONDS_PER_FILE:g} s"
        except EOFError:
            verdict = "the process died"
        self.stop()
        self._start()
        return verdict, 0.0

    def stop(self) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.pipe.close()


def _resolve_all(pipe: Connection, load: str | None) -> None:
    """What a child does until it is stopped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic in Rust speaks on stderr even when it is caught
    hook = _imported(load)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    pipe.send("ready")
    while True:
        try:
            target, cache = pipe.recv()
        except EOFError:
            return
        started_s = time.process_time()
        verdict = _what_becomes_of(target, Path(cache), hook)
        pipe.send((verdict, time.process_time() - started_s))


def _what_becomes_of(target: str, cache: Path, hook: Callable[[Checkpoint], None]) -> str:
    try:
        hook(resolve(target, cache=cache))
    except CheckpointError as error:
        return "refused" if len(str(error)) > 20 and ";" in str(error) else f"a poor sentence: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:500]
    return "accepted"


def _imported(load: str | None) -> Callable[[Checkpoint], None]:
    if load is None:
        return lambda _: None
    module, _, function = load.partition(":")
    hook: Callable[[Checkpoint], None] = getattr(importlib.import_module(module), function)
    return hook
