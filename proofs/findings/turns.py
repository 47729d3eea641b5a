"""Finding A4: one key keeps a model from all other keys. `quire serve` has three models, and memory for one at a time.

Each model in turn stays loaded for `turn_s` seconds while requests wait for another. One key attacks; the key "other"
sends chats of one token at a steady rate. How long a chat may take follows from the states of the models meanwhile.
"""

import asyncio
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import quantiles
from typing import Any

import aiohttp

from benchmarks.record import say
from benchmarks.test_model import smollm2_file
from proofs.api.load import Server, started
from proofs.framework.proof import Proof, section
from quire.api.access.keys import add_key

NAMES = ("a", "b", "c")
EACH_BYTES = 900_000_000
PROMPT = "Once upon a time"
STREAM_TOKENS = 1200
LOOK_S = 0.05
MAX_OPEN = 4
"""Chats of the other key at once, at most, so that they hardly delay each other."""
MARGIN_S = 0.5
"""How exactly we know the end of a turn, which we only poll."""
TURN_MORE_S = 5.0
HELD_S = 60.0
NUM_HOLDING = (12, 24, 48, 64)
"""How many answers keep a model loaded at once; tried in this order."""
MAX_TAKEN_S = 2.0
MIN_IN_TURN = 5
"""How many chats beside each attack must come during their model's turn; where loads are slow, attacks last longer."""
SET_ASIDE = re.compile(r"was unloaded; (\d+) requests wait until it is loaded again")


@section("models that one key takes from others")
def prove_model_taken(proof: Proof) -> None:
    """Send one-token chats beside each of four attacks."""
    turn_s, seconds = proof.sized(quick=5.0, full=30.0), proof.sized(quick=30.0, full=125.0)
    over_alone: list[float] = []
    over_bound: list[float] = []
    with serving(proof.folder, turn_s) as world, world.record_states():
        alone_text = asyncio.run(world.answer("other", NAMES[0], STREAM_TOKENS))
        alone_s = p95(asyncio.run(world.probe_times(10)))
        say(f"    alone p95 {alone_s:.2f} s")
        for attack in (stream_and_ask, alternate, cancel_and_repeat, three_models):
            num_before = len(world.probes)
            asyncio.run(world.probe_beside(attack, seconds))
            probes = world.probes[num_before:]
            in_turn_s = [probe.seconds for probe in probes if world.is_in_turn(probe)]
            rest_s = [probe.seconds - world.bound_s(probe, alone_s) for probe in probes if not world.is_in_turn(probe)]
            over_alone.append((p95(in_turn_s) if in_turn_s else alone_s) - alone_s)
            over_bound.append(p95(rest_s) if rest_s else 0.0)
            longest_s = max(probe.seconds for probe in probes)
            say(f"    {attack.__name__}: {len(in_turn_s)} chats in a turn, p95 {over_alone[-1]:+.2f} s over alone")
            say(f"    {len(rest_s)} others, p95 {over_bound[-1]:+.2f} s over their bound; at most {longest_s:.1f} s")
    num_streams, num_unequal = world.compare_streams(alone_text)
    proof.at_least("model_chats", len(world.probes), proof.sized(quick=30, full=100))
    proof.at_least(
        "model_chats_in_turn", sum(map(world.is_in_turn, world.probes)), proof.sized(quick=MIN_IN_TURN, full=60)
    )
    proof.equals("model_chats_failed", world.num_failed, 0, "of the other key")
    proof.at_most("model_taken_s", max(over_alone), MAX_TAKEN_S, "p95 over alone, the model loaded and in its turn")
    proof.at_most("model_wait_over_s", max(over_bound), 0.0, "p95 over its own load and the turns before it")
    proof.at_least("model_set_aside", world.num_set_aside(), 2, "answers")
    proof.report("model_streams", num_streams, "with text")
    proof.equals("model_taken_unequal", num_unequal, 0, "streams whose text differs from that without an attack")


@section("answers that hold a model")
def prove_model_held(proof: Proof) -> None:
    """A third key's answers hold a model, which is unloaded for the attacker; once it is loaded again, they go on."""
    with serving(proof.folder, proof.sized(quick=2.0, full=30.0)) as world, world.record_states():
        alone_text = asyncio.run(world.answer("other", NAMES[0], STREAM_TOKENS))

        async def wait_s(num_streams: int) -> float:
            streams = [asyncio.ensure_future(world.stream("holder", NAMES[0])) for _ in range(num_streams)]
            await asyncio.sleep(world.turn_s)
            start_s = time.monotonic()
            await world.answer("tight", NAMES[1], max_tokens=1)
            answer_s = time.monotonic() - start_s
            await asyncio.gather(*streams)
            return answer_s

        for num_streams in NUM_HOLDING:  # until answers last longer than they may keep a model loaded
            waited_s = asyncio.run(wait_s(num_streams))
            if world.num_set_aside():
                break
    texts = ["".join(pieces) for pieces in world.streamed]
    proof.report("model_held_wait_s", waited_s, "for a model, while answers kept another one loaded")
    proof.at_most("model_held_over_s", waited_s - world.bound_of_others_s(), 0.0, "over two loads, a turn and 60 s")
    proof.at_least("model_held_set_aside", world.num_set_aside(), 1, "answers")
    proof.equals("model_held_unequal", sum(text != alone_text for text in texts), 0, f"of {len(texts)}, whole texts")


# -- a server and the states of its models -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """One chat of one token."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Period:
    """A time in which a model was in one state."""

    name: str
    state: str
    start_s: float
    end_s: float

    def overlaps(self, probe: Probe) -> bool:
        return self.start_s < probe.end_s and self.end_s > probe.start_s


@dataclass
class World:
    """A server and its keys, the states of its models, and the outcomes of its clients' requests."""

    server: Server
    turn_s: float
    secrets: dict[str, str]
    periods: list[Period] = field(default_factory=list)
    current: dict[str, tuple[str, float]] = field(default_factory=dict)
    probes: list[Probe] = field(default_factory=list)
    num_failed: int = 0
    streamed: list[list[str]] = field(default_factory=list)
    """The pieces of text of each streamed answer; some answers were cancelled before their end."""

    # -- states of the models

    @contextmanager
    def record_states(self) -> Iterator[None]:
        """Record the states of the models while the block runs."""
        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(LOOK_S):
                models, now_s = self.server.admin("/stats")["models"], time.monotonic()
                for model in models:
                    self._note(model["name"], model["state"], now_s)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            for name in [*self.current]:
                self._note(name, "ended", time.monotonic())

    def _note(self, name: str, state: str, now_s: float) -> None:
        before = self.current.get(name)
        if before is None or before[0] != state:
            if before is not None:
                self.periods.append(Period(name, *before, now_s))
            self.current[name] = state, now_s

    def all_periods(self) -> list[Period]:
        """All periods, including those that have not ended."""
        now_s = time.monotonic()
        return [*self.periods, *(Period(name, *state, now_s) for name, state in self.current.items())]

    def is_in_turn(self, probe: Probe) -> bool:
        """Whether the probe came while its model was loaded, or should have been: in a turn that the key has used."""
        loaded = [one for one in self.all_periods() if one.name == NAMES[0] and one.state in ("ready", "busy")]
        turns = [turn for turn in loaded if turn.start_s <= probe.start_s <= turn.start_s + self.turn_s - MARGIN_S]
        return any(probe.start_s <= turn.end_s or self._has_used(turn, probe.start_s) for turn in turns)

    def _has_used(self, turn: Period, before_s: float) -> bool:
        return any(turn.start_s <= probe.end_s <= before_s for probe in self.probes)

    def bound_s(self, probe: Probe, alone_s: float) -> float:
        """How long a chat may take whose model was not loaded, or beyond its turn."""
        periods = [one for one in self.all_periods() if one.overlaps(probe)]
        load_s = sum(one.end_s - one.start_s for one in periods if (one.name, one.state) == (NAMES[0], "loading"))
        return alone_s + max(load_s + self._turns_s(periods), MAX_TAKEN_S)

    def bound_of_others_s(self) -> float:
        """How long any request may have waited so far, at most."""
        loads_s = [one.end_s - one.start_s for one in self.all_periods() if one.state == "loading"]
        return 2 * max(loads_s) + self.turn_s + TURN_MORE_S + HELD_S

    def _turns_s(self, periods: list[Period]) -> float:
        turns = [one for one in periods if one.name != NAMES[0] and one.state in ("ready", "busy")]
        loads_s = {one.name: one.end_s - one.start_s for one in self.all_periods() if one.state == "loading"}
        holds = [one for one in periods if one.state == "unloading" and one.end_s - one.start_s > MAX_TAKEN_S]
        return sum(loads_s.get(turn.name, 0.0) + self.turn_s + TURN_MORE_S for turn in turns) + HELD_S * len(holds)

    def num_set_aside(self) -> int:
        """How many answers were interrupted when a model was unloaded, to go on once it is loaded again."""
        return sum(int(match[1]) for line in self.server.lines if (match := SET_ASIDE.search(line)))

    def compare_streams(self, alone_text: str) -> tuple[int, int]:
        """The number of streams with text, and of those whose text is not a beginning of `alone_text`."""
        texts = ["".join(pieces) for pieces in self.streamed if pieces]
        return len(texts), sum(not alone_text.startswith(text) for text in texts)

    # -- its clients

    def session(self, key: str) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), headers={"x-api-key": self.secrets[key]})

    async def ask(self, key: str, model: str, max_tokens: int) -> tuple[int, dict[str, Any]]:
        async with self.session(key) as session, session.post(self.url, json=_body(model, max_tokens)) as response:
            return response.status, await response.json()

    async def answer(self, key: str, model: str, max_tokens: int) -> str:
        status, body = await self.ask(key, model, max_tokens)
        if status != 200:
            raise RuntimeError(f"expected status 200, got {status}: {body}")
        return str(body["choices"][0]["text"])

    async def stream(self, key: str, model: str) -> None:
        """Read a long answer to its end; a refusal is ignored."""
        pieces: list[str] = []
        self.streamed.append(pieces)
        body = _body(model, STREAM_TOKENS) | {"stream": True}
        async with self.session(key) as session, session.post(self.url, json=body) as response:
            if response.status != 200:
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line.removeprefix(b"data: "))
                    pieces += [choice["text"] for choice in chunk.get("choices", [{"text": f"broke: {chunk}"}])]

    async def probe(self) -> float:
        start_s = time.monotonic()
        status, body = await self.ask("other", NAMES[0], max_tokens=1)
        if status != 200:
            say(f"    the other key: {status} {body}")
            self.num_failed += 1
        self.probes.append(Probe(start_s, time.monotonic()))
        return self.probes[-1].seconds

    async def probe_times(self, count: int) -> list[float]:
        """Send probes one after the other; returns their seconds."""
        return [await self.probe() for _ in range(count)]

    async def probe_beside(self, attack: "Attack", seconds: float) -> None:
        """Send probes beside an attack, for up to twice as long where loads are slow."""
        attack_task, num_before, start_s = asyncio.ensure_future(attack(self)), len(self.probes), time.monotonic()
        tasks: list[asyncio.Future[float]] = []
        while (passed_s := time.monotonic() - start_s) < 2 * seconds:
            if passed_s > seconds and sum(map(self.is_in_turn, self.probes[num_before:])) >= MIN_IN_TURN:
                break
            if sum(not task.done() for task in tasks) < MAX_OPEN:
                tasks.append(asyncio.ensure_future(self.probe()))
            await asyncio.sleep(1.0)
        await asyncio.gather(*tasks)
        attack_task.cancel()
        await asyncio.gather(attack_task, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"{self.server.url}/v1/completions"


def _body(model: str, max_tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


@contextmanager
def serving(folder: Path, turn_s: float) -> Iterator[World]:
    """A server with three models, memory for one of them, and three keys."""
    lines = [f'memory = "{int(EACH_BYTES * 1.5)}"', "max_model_len = 2048", f"turn_s = {turn_s}"]
    for name in NAMES:
        lines += [f"[models.{name}]", f'model = "{smollm2_file()}"', f'memory = "{EACH_BYTES}"']
    config, keys = folder / "turns.toml", folder / "turns-keys.json"
    config.write_text("\n".join(lines))
    keys.unlink(missing_ok=True)
    secrets = {name: add_key(keys, name) for name in ("tight", "other", "holder")}
    words = ("--config", str(config), "--keys-file", str(keys))
    with started(folder, *words, module="quire serve") as server:
        yield World(server, turn_s, secrets)


def p95(values: list[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


# -- attacks -----------------------------------------------------------------------------------------------------------

Attack = Callable[[World], Awaitable[None]]
"""Runs until it is cancelled."""


async def stream_and_ask(world: World) -> None:
    """Begin a long answer of one model, then request one token of another model."""
    while True:
        async with asyncio.TaskGroup() as group:
            group.create_task(world.stream("tight", NAMES[0]))
            await asyncio.sleep(0.5)
            await _paused_ask(world, NAMES[1])


async def alternate(world: World) -> None:
    """Request one token of one model, then one of another, and so on."""
    for name in cycle(NAMES[:2]):
        await _paused_ask(world, name)


async def cancel_and_repeat(world: World) -> None:
    """Request another model and cancel, over and over, beside streams of the first model."""

    async def streams() -> None:
        while True:
            await world.stream("tight", NAMES[0])
            await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as group:
        group.create_task(streams())
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.5):
                    await _paused_ask(world, NAMES[1])


async def three_models(world: World) -> None:
    """Read streams of each of three models, over and over."""

    async def streams_of(name: str) -> None:
        while True:
            await world.stream("tight", name)
            await asyncio.sleep(0.2)

    await asyncio.gather(*map(streams_of, NAMES))


async def _paused_ask(world: World, model: str) -> None:
    """Request one token; after a refusal, wait for a second."""
    status, _ = await world.ask("tight", model, max_tokens=1)
    if status != 200:
        await asyncio.sleep(1.0)
