"""Findings: one key takes a model away from all others (A4). Three models and the memory of one, behind `quire serve`.

One key attacks, another sends one-token chats at a steady rate, whether or not those before are answered. What each of
them may take follows from what the server's models were at meanwhile, as its operator sees it.
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
MOST_OPEN = 4
"""Chats of the other key at once: their own crowd is not what is measured."""
MARGIN_S = 0.5
"""Of the end of a turn that is seen from outside."""
TURN_MORE_S = 5.0
HELD_S = 60.0
HOLDING = (12, 24, 48, 64)
"""Answers that hold a model at once."""
TAKEN_S = 2.0
LEAST_IN_TURN = 5
"""Chats that find the model in its turn, beside each attack; it takes longer where loads are slow."""
SET_ASIDE = re.compile(r"was unloaded; (\d+) requests wait until it is loaded again")


@section("models that one key takes from others")
def taken(proof: Proof) -> None:
    """A stream and another model, alternation, cancel and repeat, three models."""
    turn_s, seconds = proof.sized(quick=5.0, full=30.0), proof.sized(quick=30.0, full=125.0)
    over_alone: list[float] = []
    over_bound: list[float] = []
    with serving(proof.folder, turn_s) as world, world.watched():
        alone_text = asyncio.run(world.answer("other", NAMES[0], STREAM_TOKENS))
        alone = p95(asyncio.run(world.probes(10)))
        say(f"    alone p95 {alone:.2f} s")
        for attack in (stream_and_ask, alternate, cancel_and_repeat, three_models):
            begun = len(world.probed)
            asyncio.run(world.beside(attack, seconds))
            probed = world.probed[begun:]
            in_turn = [one.seconds for one in probed if world.is_in_turn(one)]
            rest = [one.seconds - world.bound_s(one, alone) for one in probed if not world.is_in_turn(one)]
            over_alone.append((p95(in_turn) if in_turn else alone) - alone)
            over_bound.append(p95(rest) if rest else 0.0)
            longest_s = max(one.seconds for one in probed)
            say(f"    {attack.__name__}: {len(in_turn)} chats in a turn, p95 {over_alone[-1]:+.2f} s over alone")
            say(f"    {len(rest)} others, p95 {over_bound[-1]:+.2f} s over their bound; one took {longest_s:.1f} s")
    begun, unequal = world.compared(alone_text)
    proof.at_least("model_chats", len(world.probed), proof.sized(quick=30, full=100))
    proof.at_least(
        "model_chats_in_turn", sum(map(world.is_in_turn, world.probed)), proof.sized(quick=LEAST_IN_TURN, full=60)
    )
    proof.equals("model_chats_failed", world.num_failed, 0, "of the other key")
    proof.at_most("model_taken_s", max(over_alone), TAKEN_S, "p95 over alone, the model loaded and in its turn")
    proof.at_most("model_wait_over_s", max(over_bound), 0.0, "p95 over its own load and the turns before it")
    proof.at_least("model_set_aside", world.num_set_aside(), 2, "answers")
    proof.report("model_streams", begun, "that were read")
    proof.equals("model_taken_unequal", unequal, 0, "of those, went on otherwise than alone")


@section("answers that hold a model")
def held(proof: Proof) -> None:
    """A third key's answers hold the model that the attacker's wish sends away; they end as alone, once it is back."""
    with serving(proof.folder, proof.sized(quick=2.0, full=30.0)) as world, world.watched():
        alone_text = asyncio.run(world.answer("other", NAMES[0], STREAM_TOKENS))

        async def scene(num_streams: int) -> float:
            streams = [asyncio.ensure_future(world.stream("holder", NAMES[0])) for _ in range(num_streams)]
            await asyncio.sleep(world.turn_s)
            begun_s = time.monotonic()
            await world.answer("tight", NAMES[1], 1)
            taken_s = time.monotonic() - begun_s
            await asyncio.gather(*streams)
            return taken_s

        for num_streams in HOLDING:  # until answers last longer than they may hold a model
            waited_s = asyncio.run(scene(num_streams))
            if world.num_set_aside():
                break
    ended = ["".join(texts) for texts in world.streamed]
    proof.report("model_held_wait_s", waited_s, "for a model whose room answers held")
    proof.at_most("model_held_over_s", waited_s - world.bound_of_others_s(), 0.0, "over its load, a turn and 60 s")
    proof.at_least("model_held_set_aside", world.num_set_aside(), 1, "answers")
    proof.equals("model_held_unequal", sum(one != alone_text for one in ended), 0, f"of {len(ended)}, all of the text")


# -- a server, looked at -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """One chat of one token."""

    begun_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.begun_s


@dataclass(frozen=True, slots=True)
class Period:
    """A model was in one state."""

    name: str
    state: str
    begun_s: float
    ended_s: float

    def overlaps(self, probe: Probe) -> bool:
        return self.begun_s < probe.ended_s and self.ended_s > probe.begun_s


@dataclass
class World:
    """A server, its keys, what its models were at and what became of its clients."""

    server: Server
    turn_s: float
    secrets: dict[str, str]
    periods: list[Period] = field(default_factory=list)
    current: dict[str, tuple[str, float]] = field(default_factory=dict)
    probed: list[Probe] = field(default_factory=list)
    num_failed: int = 0
    streamed: list[list[str]] = field(default_factory=list)
    """The texts of each answer that was streamed, some of which are cut off in the end."""

    # -- what its models were at

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Beside what is done meanwhile."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOK_S):
                told, now_s = self.server.admin("/stats")["models"], time.monotonic()
                for one in told:
                    self._note(one["name"], one["state"], now_s)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            over.set()
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
        """Those that have not ended as well."""
        now_s = time.monotonic()
        return [*self.periods, *(Period(name, *of, now_s) for name, of in self.current.items())]

    def is_in_turn(self, probe: Probe) -> bool:
        """It was sent while the model it asks was there, or should have been: within a turn that this key has used."""
        here = [one for one in self.all_periods() if one.name == NAMES[0] and one.state in ("ready", "busy")]
        turns = [one for one in here if one.begun_s <= probe.begun_s <= one.begun_s + self.turn_s - MARGIN_S]
        return any(probe.begun_s <= one.ended_s or self._has_used(one, probe.begun_s) for one in turns)

    def _has_used(self, turn: Period, before_s: float) -> bool:
        return any(turn.begun_s <= one.ended_s <= before_s for one in self.probed)

    def bound_s(self, probe: Probe, alone_s: float) -> float:
        """What a chat may take whose model was away, or beyond its turn."""
        around = [one for one in self.all_periods() if one.overlaps(probe)]
        own_s = sum(one.ended_s - one.begun_s for one in around if (one.name, one.state) == (NAMES[0], "loading"))
        return alone_s + max(own_s + self._turns_s(around), TAKEN_S)

    def bound_of_others_s(self) -> float:
        """The longest that any request may have waited so far."""
        loads_s = [one.ended_s - one.begun_s for one in self.all_periods() if one.state == "loading"]
        return 2 * max(loads_s) + self.turn_s + TURN_MORE_S + HELD_S

    def _turns_s(self, around: list[Period]) -> float:
        turns = [one for one in around if one.name != NAMES[0] and one.state in ("ready", "busy")]
        loads_s = {one.name: one.ended_s - one.begun_s for one in self.all_periods() if one.state == "loading"}
        holds = [one for one in around if one.state == "unloading" and one.ended_s - one.begun_s > TAKEN_S]
        return sum(loads_s.get(one.name, 0.0) + self.turn_s + TURN_MORE_S for one in turns) + HELD_S * len(holds)

    def num_set_aside(self) -> int:
        """Answers, over all times."""
        return sum(int(found[1]) for line in self.server.lines if (found := SET_ASIDE.search(line)))

    def compared(self, alone_text: str) -> tuple[int, int]:
        """Streams that said something, and those of them that are not the beginning of what is said alone."""
        begun = ["".join(texts) for texts in self.streamed if texts]
        return len(begun), sum(not alone_text.startswith(text) for text in begun)

    # -- its clients

    def session(self, key: str) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), headers={"x-api-key": self.secrets[key]})

    async def ask(self, key: str, model: str, max_tokens: int) -> tuple[int, dict[str, Any]]:
        async with self.session(key) as session, session.post(self.url, json=_body(model, max_tokens)) as response:
            return response.status, await response.json()

    async def answer(self, key: str, model: str, max_tokens: int) -> str:
        status, told = await self.ask(key, model, max_tokens)
        if status != 200:
            raise RuntimeError(f"{status} {told}")
        return str(told["choices"][0]["text"])

    async def stream(self, key: str, model: str) -> None:
        """A long answer, read to its end; one that is refused counts for nothing."""
        texts: list[str] = []
        self.streamed.append(texts)
        body = _body(model, STREAM_TOKENS) | {"stream": True}
        async with self.session(key) as session, session.post(self.url, json=body) as response:
            if response.status != 200:
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    told = json.loads(line.removeprefix(b"data: "))
                    texts += [choice["text"] for choice in told.get("choices", [{"text": f"broke: {told}"}])]

    async def probe(self) -> float:
        begun_s = time.monotonic()
        status, told = await self.ask("other", NAMES[0], 1)
        if status != 200:
            say(f"    the other key: {status} {told}")
            self.num_failed += 1
        self.probed.append(Probe(begun_s, time.monotonic()))
        return self.probed[-1].seconds

    async def probes(self, count: int) -> list[float]:
        """One after the other."""
        return [await self.probe() for _ in range(count)]

    async def beside(self, attack: "Attack", seconds: float) -> None:
        """Probes beside an attack, twice as long where loads are slow."""
        attacking, begun, begun_s = asyncio.ensure_future(attack(self)), len(self.probed), time.monotonic()
        probing: list[asyncio.Future[float]] = []
        while (passed_s := time.monotonic() - begun_s) < 2 * seconds:
            if passed_s > seconds and sum(map(self.is_in_turn, self.probed[begun:])) >= LEAST_IN_TURN:
                break
            if sum(not one.done() for one in probing) < MOST_OPEN:
                probing.append(asyncio.ensure_future(self.probe()))
            await asyncio.sleep(1.0)
        await asyncio.gather(*probing)
        attacking.cancel()
        await asyncio.gather(attacking, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"{self.server.url}/v1/completions"


def _body(model: str, max_tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


@contextmanager
def serving(folder: Path, turn_s: float) -> Iterator[World]:
    """Three models, the memory of one, three keys."""
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
"""Goes on until it is cancelled."""


async def stream_and_ask(world: World) -> None:
    """A long answer of one model, then one token of another."""
    while True:
        async with asyncio.TaskGroup() as group:
            group.create_task(world.stream("tight", NAMES[0]))
            await asyncio.sleep(0.5)
            await _paused_ask(world, NAMES[1])


async def alternate(world: World) -> None:
    """One model, the other, and again."""
    for name in cycle(NAMES[:2]):
        await _paused_ask(world, name)


async def cancel_and_repeat(world: World) -> None:
    """Ask for another model, leave, and again, beside streams of the first."""

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
    """A stream of each of three, over and over."""

    async def of(name: str) -> None:
        while True:
            await world.stream("tight", name)
            await asyncio.sleep(0.2)

    await asyncio.gather(*map(of, NAMES))


async def _paused_ask(world: World, model: str) -> None:
    """One token; after a refusal, a second of nothing."""
    status, _ = await world.ask("tight", model, 1)
    if status != 200:
        await asyncio.sleep(1.0)
