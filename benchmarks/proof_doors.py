"""`make proof-doors`: real sockets, a real server; the oracle where counts matter, the real model where text does.

Needs the dev extra; the JavaScript SDK is tried where node and npm are, fetched by name.
"""

import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import aiohttp
import openai

import quire
from benchmarks.doors_load import (
    OUTBOUND,
    Server,
    leave,
    listeners,
    percentile,
    slow_wire,
    started,
    stream_text,
)
from benchmarks.doors_strangers import auth, hostile
from benchmarks.proof import Proof, run, say
from benchmarks.test_model import smollm2_directory
from quire.api.keys import add_key
from quire.backends.oracle import OracleRunner
from quire.core.step import StepPlan, StepResult
from quire.engine.async_engine import AsyncEngine
from quire.engine.opening import open_model
from quire.engine.parameters import SamplingParams
from tests.support.doors import House, house
from tests.support.talkers import talker

WORDS = [
    "river", "stone", "light", "winter", "garden", "letter", "morning", "engine", "quiet", "harbour", "second",
    "orange", "window", "seven", "paper",
]  # fmt: skip


def prove(proof: Proof) -> None:
    dice = Random(SystemRandom().getrandbits(64))
    with tempfile.TemporaryDirectory(prefix="quire-doors-") as name:
        folder = Path(name)
        folder.chmod(0o700)
        proof.run_sections(
            [
                ("sdk", lambda: sdk(proof, folder, dice)),
                ("cached tokens", lambda: cached_tokens(proof, dice)),
                ("disconnects", lambda: disconnects(proof, folder, dice)),
                ("slow readers", lambda: slow_readers(proof, folder)),
                ("hostile", lambda: hostile(proof, folder, dice)),
                ("auth", lambda: auth(proof, folder)),
                ("drain", lambda: drain(proof, folder, dice)),
                ("overload", lambda: overload(proof, folder, dice)),
                ("http overhead", lambda: http_overhead(proof, folder)),
                ("listeners", lambda: listening(proof, folder)),
            ]
        )


def _phrase(dice: Random, most: int = 12) -> str:
    return " ".join(dice.choices(WORDS, k=dice.randint(1, most)))


# -- the official SDKs -------------------------------------------------------------------------------------------------


def sdk(proof: Proof, folder: Path, dice: Random) -> None:
    count = proof.sized(quick=60, full=1000)
    num_js = count // 2 if _has_js(folder) else 0
    with started(folder) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        wrong = [told for at in range(count - num_js) if (told := _sdk_case(client, dice, at))]
        wrong += _js_cases(folder, server, num_js, dice) if num_js else []
    for told in wrong[:5]:
        say(f"  {told}")
    proof.report("sdk_cases", count)
    proof.report("sdk_js_cases", num_js)
    proof.report("sdk_wrong", len(wrong), "0", holds=not wrong)


def _sdk_case(client: openai.OpenAI, dice: Random, at: int) -> str | None:
    """One question asked in several ways, or one mistake; what was wrong with the answer."""
    asked: dict[str, Any] = {"model": "oracle", "max_tokens": dice.randint(1, 60), "seed": at}
    asked |= {"n": dice.choice([1, 1, 2, 3]), "stop": dice.choice([None, "e", ["q", "zz"]])}
    match at % 5:
        case 0:
            return _sdk_error(client, dice)
        case 1 | 2:
            asked |= {"messages": [{"role": "user", "content": _phrase(dice)}], "logprobs": True, "top_logprobs": 2}
            whole = client.chat.completions.create(**asked)
            texts, tokens = [""] * asked["n"], [0] * asked["n"]
            for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    tokens[choice.index] += len((choice.logprobs and choice.logprobs.content) or ())
                usage = chunk.usage
            told = [choice.message.content for choice in whole.choices]
            ok = texts == told and usage is not None and whole.usage is not None
            ok = ok and sum(tokens) == usage.completion_tokens == whole.usage.completion_tokens
        case _:
            asked |= {"prompt": _phrase(dice), "logprobs": 1}
            first, again = client.completions.create(**asked), client.completions.create(**asked)
            texts = [""] * asked["n"]
            for piece in client.completions.create(**asked, stream=True):
                for one in piece.choices:
                    texts[one.index] += one.text
            ok = texts == [choice.text for choice in first.choices] == [choice.text for choice in again.choices]
    return None if ok else f"case {at}: {asked}"


def _sdk_error(client: openai.OpenAI, dice: Random) -> str | None:
    mistakes: list[tuple[dict[str, Any], type[openai.APIStatusError], str]] = [
        ({"model": "nobody", "prompt": "x"}, openai.NotFoundError, "model_not_found"),
        ({"model": "oracle", "prompt": "x", "n": 9}, openai.BadRequestError, "invalid_parameter"),
        ({"model": "oracle", "prompt": "x " * 900}, openai.BadRequestError, "context_length_exceeded"),
        ({"model": "oracle", "prompt": "x", "temperature": -1}, openai.BadRequestError, "invalid_parameter"),
    ]
    asked, kind, code = dice.choice(mistakes)
    try:
        client.completions.create(**asked)
    except openai.APIStatusError as error:
        return None if isinstance(error, kind) and error.code == code else f"{asked}: {error}"
    return f"{asked} was answered"


def _has_js(folder: Path) -> bool:
    """The SDK of the same name for JavaScript, where it can be had."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return False
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder / "js"), "openai"]
    return subprocess.run(command, capture_output=True, timeout=180).returncode == 0


JS = """\
import OpenAI from "openai";
const [url, from, count] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
let wrong = 0;
for (let seed = Number(from); seed < Number(from) + Number(count); seed++) {
  const asked = { model: "oracle", seed, n: 1 + (seed % 2), max_tokens: 5 + (seed % 40),
    stop: seed % 3 ? undefined : "e", messages: [{ role: "user", content: `question ${seed}` }] };
  const whole = await client.chat.completions.create(asked);
  const texts = whole.choices.map(() => "");
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
    for (const choice of chunk.choices) texts[choice.index] += choice.delta.content ?? "";
  if (JSON.stringify(texts) !== JSON.stringify(whole.choices.map((choice) => choice.message.content))) wrong++;
  if (seed % 10 === 0)
    try { await client.completions.create({ model: "nobody", prompt: "x" }); wrong++; }
    catch (error) { if (error.status !== 404 || error.code !== "model_not_found") wrong++; }
}
console.log(wrong);
"""


def _js_cases(folder: Path, server: Server, count: int, dice: Random) -> list[str]:
    script = folder / "js" / "cases.mjs"
    script.write_text(JS)
    command = ["node", str(script), f"{server.url}/v1", str(dice.randint(0, 10**6)), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if done.returncode != 0:
        return [f"javascript: {done.stderr[-300:]}"]
    return ["javascript"] * int(done.stdout)


# -- cached tokens -----------------------------------------------------------------------------------------------------


class CountingRunner(OracleRunner):
    """Notes which prompt positions were computed for whom before they were preempted for the first time."""

    def __init__(self, inner: OracleRunner) -> None:
        super().__init__(inner.capacity)
        self.fed: dict[int, set[int]] = {}
        self.is_closed_for: set[int] = set()
        self.interrupted: set[int] = set()
        """Preempted before their prompt was computed: their first pass was never finished."""
        self.seed_of: dict[int, int] = {}
        self.num_prompt: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for one in plan.dropped_sequence_ids:
            self.is_closed_for.add(one)
            if one not in self.num_prompt:
                self.interrupted.add(one)
        for item in plan.items:
            if item.sequence_id not in self.is_closed_for:
                positions = range(item.first_position, item.first_position + len(item.token_ids))
                self.fed.setdefault(item.sequence_id, set()).update(positions)
            if item.sampling is not None:
                self.seed_of[item.sequence_id] = item.sampling.seed
                self.num_prompt[item.sequence_id] = item.sampling.num_prompt_tokens
        return super().run(plan)

    def cached_by_seed(self) -> dict[int, int]:
        """Prompt tokens nobody computed for it on its first pass."""
        return {
            seed: self.num_prompt[one] - len([at for at in self.fed[one] if at < self.num_prompt[one]])
            for one, seed in self.seed_of.items()
            if one not in self.interrupted
        }


def cached_tokens(proof: Proof, dice: Random) -> None:
    """Usage against what the runner was fed: cold, warm, and under preemption in a pool that is too small."""
    count = proof.sized(quick=200, full=1000)
    opened = talker(num_blocks=150, max_running=16)
    runner = CountingRunner(opened.engine.runner)  # type: ignore[arg-type]
    opened.engine.runner = runner
    shared = [[dice.randrange(40, 300) for _ in range(80)] for _ in range(6)]

    async def ask(here: House) -> dict[int, int]:
        told: dict[int, int] = {}
        gate = asyncio.Semaphore(24)

        async def one(session: aiohttp.ClientSession, seed: int) -> None:
            ids = dice.choice(shared)[: dice.randint(1, 80)] + [
                dice.randrange(40, 300) for _ in range(dice.randint(1, 40))
            ]
            body = {
                "model": "oracle",
                "prompt": ids,
                "max_tokens": dice.randint(1, 60),
                "seed": seed,
                "ignore_eos": True,
            }
            async with gate, session.post(f"{here.url}/v1/completions", json=body) as response:
                told[seed] = (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]

        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(one(session, seed) for seed in range(count)))
        return told

    with house(models={"oracle": opened}) as here:
        told = asyncio.run(ask(here))
    computed = runner.cached_by_seed()
    wrong = [seed for seed, cached in computed.items() if told[seed] != cached]
    proof.report("cached_tokens_hits", sum(value > 0 for value in told.values()))
    proof.report("cached_tokens_preemptions", opened.engine.scheduler.stats.num_preemptions)
    proof.report("cached_tokens_compared", len(computed), "at least 0.8", holds=len(computed) >= 0.8 * count)
    proof.report("cached_tokens_wrong", len(wrong), f"0 of {len(computed)}", holds=not wrong)


# -- clients that leave, clients that do not read ----------------------------------------------------------------------


def disconnects(proof: Proof, folder: Path, dice: Random) -> None:
    count, at_once = proof.sized(quick=800, full=20_000), proof.sized(quick=80, full=500)
    with started(folder, "--max-inside", "2000", "--queue", "2000") as server:
        asyncio.run(_come_and_go(server, 40, 20, Random(1)))
        _settle(server)
        before = (server.num_descriptors(), server.admin("/stats")["num_tasks"])
        num_left, wrong = asyncio.run(_come_and_go(server, count, at_once, dice))
        seconds = _settle(server)
        stats = server.admin("/stats")
        after = (server.num_descriptors(), stats["num_tasks"])
        held = stats["models"][0]["engine"]["kv_usage"] * stats["models"][0]["engine"]["num_blocks"]
        leaked = int(held) + stats["num_inside"] + max(0, after[0] - before[0]) + max(0, after[1] - before[1])
    proof.report("disconnect_requests", count)
    proof.report("disconnects", num_left, "at least 0.25 of them", holds=num_left >= 0.25 * count)
    proof.report("disconnect_survivors_wrong", wrong, "0", holds=wrong == 0)
    proof.report("disconnect_settled_s", seconds, "at most 1", holds=seconds <= 1.0)
    proof.report("leaked", leaked, "0 blocks, requests, tasks, descriptors", holds=leaked == 0)


async def _come_and_go(server: Server, count: int, at_once: int, dice: Random) -> tuple[int, int]:
    """How many left early, and how many of the others got less than they asked for."""
    num_left = num_wrong = 0
    gate = asyncio.Semaphore(at_once)

    async def one(session: aiohttp.ClientSession) -> None:
        nonlocal num_left, num_wrong
        num_tokens = dice.randint(5, 120)
        body = {"model": "oracle", "prompt": _phrase(dice), "max_tokens": num_tokens, "ignore_eos": True}
        async with gate:
            if dice.random() < 0.3:
                num_left += 1
                after = dice.choice(["half a body", "nothing", "headers", "some text"])
                body["stream"] = dice.random() < 0.7
                await leave(server.port, body, after, dice.random() < 0.5)
            elif dice.random() < 0.5:
                _, _, tail = await stream_text(session, server.url, body)
                num_wrong += tail.strip() != b"data: [DONE]"
            else:
                async with session.post(f"{server.url}/v1/completions", json=body) as response:
                    num_wrong += (await response.json())["usage"]["completion_tokens"] != num_tokens

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
        await asyncio.gather(*(one(session) for _ in range(count)))
    return num_left, num_wrong


def _settle(server: Server) -> float:
    """Seconds until nobody is inside and nothing is held; 60 at most."""
    begun = time.perf_counter()
    while time.perf_counter() - begun < 60:
        stats = server.admin("/stats")
        if not stats["num_inside"] and not stats["models"][0]["engine"]["kv_usage"]:
            time.sleep(0.3)  # descriptors of connections that were just closed
            return time.perf_counter() - begun - 0.3
        time.sleep(0.02)
    return 60.0


def slow_readers(proof: Proof, folder: Path) -> None:
    """Normal readers with and without slow ones among them, in turns."""
    num_slow, num_normal = proof.sized(quick=10, full=50), proof.sized(quick=30, full=150)
    num_tokens, stuck_s = proof.sized(quick=1_500, full=20_000), 2.0 if not proof.is_full else 30.0
    words = ("--running", "256", "--sequence-tokens", str(num_tokens + 200), "--send-buffer", "65536",
             "--blocks", str((num_slow + num_normal) * (num_tokens // 16 + 20)), "--stuck-s", str(stuck_s))  # fmt: skip
    ratios, num_cut, baseline_ms = [], 0, 0.0
    with started(folder, *words) as server:
        for _ in range(1 if not proof.is_full else 2):
            base = asyncio.run(_gaps(server, num_normal, num_slow, 0, num_tokens))
            with_slow = asyncio.run(_gaps(server, num_normal, 0, num_slow, num_tokens))
            baseline_ms = percentile(base, 0.99) * 1000
            ratios.append(percentile(with_slow, 0.99) * 1000 / baseline_ms)
        _settle(server)
        server.stop()
        num_cut = sum(line.get("error") == "reader_too_slow" for line in server.access_lines())
    wanted = num_slow * len(ratios)
    proof.report("slow_baseline_p99_ms", baseline_ms)
    proof.report("slow_reader_effect", statistics.median(ratios), "at most 1.2", holds=statistics.median(ratios) <= 1.2)
    proof.report("slow_cut", num_cut, f"{wanted} of {wanted}", holds=num_cut == wanted)


async def _gaps(server: Server, num_normal: int, num_more: int, num_slow: int, num_tokens: int) -> list[float]:
    """Times between tokens of the normal readers, while others read as quickly or hardly at all."""
    body = {"model": "oracle", "max_tokens": num_tokens, "ignore_eos": True}
    slow = [slow_wire(server.port, {**body, "prompt": f"slow {at}", "logprobs": 5}) for at in range(num_slow)]
    over = asyncio.Event()
    dripping = asyncio.ensure_future(_drip(slow, over))

    async def one(session: aiohttp.ClientSession, at: int) -> list[float]:
        _, moments, tail = await stream_text(session, server.url, {**body, "prompt": f"reader {at}"})
        if tail.strip() != b"data: [DONE]":
            raise RuntimeError(f"a normal reader was cut: {tail!r}")
        return [later - earlier for earlier, later in pairwise(moments)]

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(3600)) as session:
        # The others among the quick ones ask for as much as the slow ones would.
        more = [asyncio.ensure_future(one(session, 1000 + at)) for at in range(num_more)]
        gaps = await asyncio.gather(*(one(session, at) for at in range(num_normal)))
        await asyncio.gather(*more)
    deadline = time.perf_counter() + 60
    while num_slow and time.perf_counter() < deadline and server.admin("/stats")["num_inside"]:
        await asyncio.sleep(0.2)
    over.set()
    await dripping
    return [gap for own in gaps for gap in own]


async def _drip(wires: list[Any], over: asyncio.Event) -> None:
    """One byte a second from each."""
    for wire in wires:
        wire.setblocking(False)
    while not over.is_set():
        for wire in wires:
            try:
                wire.recv(1)
            except (BlockingIOError, ConnectionError):
                continue
        try:
            await asyncio.wait_for(over.wait(), 1.0)
        except TimeoutError:
            continue
    for wire in wires:
        wire.close()


# -- ends --------------------------------------------------------------------------------------------------------------


def drain(proof: Proof, folder: Path, dice: Random) -> None:
    count, failures, ready_ms = proof.sized(quick=4, full=30), [], []
    for at in range(count):
        drain_s = dice.choice([0.3, 1.0, 3.0])
        with started(folder, "--step-s", "0.01", "--drain-s", str(drain_s)) as server:
            told = asyncio.run(_drain_once(server, dice, drain_s))
        ready_ms.append(told[0])
        if told[1]:
            failures.append(told[1])
            say(f"  {at}: {told[1]}")
    proof.report("drain_ready_ms", max(ready_ms), "at most 100", holds=max(ready_ms) <= 100)
    proof.report("drain_failures", len(failures), f"0 of {count}", holds=not failures)


async def _drain_once(server: Server, dice: Random, drain_s: float) -> tuple[float, str]:
    """How long until it was not ready, and what went wrong."""
    body = {"model": "oracle", "max_tokens": 400, "ignore_eos": True}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:

        async def one(at: int) -> bytes:
            try:
                return (await stream_text(session, server.url, {**body, "prompt": f"question {at}"}))[2]
            except aiohttp.ClientError as error:
                return f"broken: {error!r}".encode()

        streams = [asyncio.ensure_future(one(at)) for at in range(20)]
        await asyncio.sleep(dice.uniform(0.0, 0.6))
        begun = time.perf_counter()
        server.process.terminate()
        ready_ms = await _until_not_ready(session, server, begun)
        tails = await asyncio.gather(*streams)
    code = await asyncio.to_thread(server.process.wait, drain_s + 10)
    seconds = time.perf_counter() - begun
    # A stream is told its end; one that had not begun is refused with a whole error.
    unsaid = [tail for tail in tails if tail.strip() != b"data: [DONE]" and not tail.startswith(b'{"error"')]
    if unsaid or code != 0 or seconds > drain_s + 5:
        return (
            ready_ms,
            f"code {code} after {seconds:.1f} s of {drain_s}, {len(unsaid)} streams without an end: {unsaid[:2]}",
        )
    return ready_ms, ""


async def _until_not_ready(session: aiohttp.ClientSession, server: Server, begun: float) -> float:
    while True:
        try:
            async with session.get(f"{server.url}/ready") as response:
                is_ready = response.status == 200
        except aiohttp.ClientError:
            is_ready = False
        if not is_ready:
            return (time.perf_counter() - begun) * 1000


# -- the real model ----------------------------------------------------------------------------------------------------


def _serve_words(*more: str) -> tuple[str, ...]:
    return (str(smollm2_directory()), "--served-model-name", "m", "--memory", "2GiB", "--max-model-len", "1024", *more)


def overload(proof: Proof, folder: Path, dice: Random) -> None:
    """Ten times what it can do: what it does then."""
    seconds, lead_s = proof.sized(quick=8, full=60), 4.0 if not proof.is_full else 20.0
    words = _serve_words("--queue", "64", "--max-inside", "128")
    with started(folder, *words, module="quire serve") as server:
        capacity = asyncio.run(_closed_loop(server, 64, (lead_s, float(seconds)), dice))
        before = server.resident_bytes()
        done, rejected = asyncio.run(_open_loop(server, 10 * capacity, (lead_s, float(seconds)), dice))
        growth = server.resident_bytes() / before - 1
        server.stop()
    missing = sum(not has_retry for _, has_retry in rejected)
    reject_ms = percentile([ms for ms, _ in rejected], 0.99) if rejected else 0.0
    goodput = done / seconds / capacity
    proof.report("overload_capacity_rps", capacity)
    proof.report("overload_rejected", len(rejected), "some", holds=bool(rejected))
    proof.report("missing_retry_after", missing, "0", holds=missing == 0)
    proof.report("reject_p99_ms", reject_ms, "at most 50", holds=reject_ms <= 50)
    proof.report("goodput", goodput, "at least 0.95", holds=goodput >= 0.95)
    proof.report("memory_growth", growth, "at most 0.05", holds=growth <= 0.05)


def _small_body(dice: Random) -> dict[str, Any]:
    return {"model": "m", "prompt": _phrase(dice, 30), "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


async def _closed_loop(server: Server, num_clients: int, window_s: tuple[float, float], dice: Random) -> float:
    """Requests a second with so many clients that each wait for their answer; counted once it has got going."""
    done, begin = 0, time.perf_counter() + window_s[0]
    end = begin + window_s[1]

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal done
        while time.perf_counter() < end:
            async with session.post(f"{server.url}/v1/completions", json=_small_body(dice)) as response:
                await response.read()
                done += response.status == 200 and begin <= time.perf_counter() < end

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(num_clients)))
    return done / window_s[1]


async def _open_loop(
    server: Server, rate: float, window_s: tuple[float, float], dice: Random
) -> tuple[int, list[tuple[float, bool]]]:
    """Requests come whether answered or not: how many were served in the window, how the others were turned away."""
    done, begin = 0, time.perf_counter() + window_s[0]
    rejected: list[tuple[float, bool]] = []
    end = begin + window_s[1]

    async def one(session: aiohttp.ClientSession) -> None:
        nonlocal done
        begun = time.perf_counter()
        async with session.post(f"{server.url}/v1/completions", json=_small_body(dice)) as response:
            await response.read()
            if response.status == 200:
                done += begin <= time.perf_counter() < end
            elif response.status in (429, 503):
                rejected.append(((time.perf_counter() - begun) * 1000, "retry-after" in response.headers))
            else:
                raise RuntimeError(f"{response.status} under load")

    tasks: set[asyncio.Task[None]] = set()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:
        while time.perf_counter() < end:
            tasks.add(asyncio.ensure_future(one(session)))
            await asyncio.sleep(dice.expovariate(rate))
        for task in tasks:
            await task
    return done, rejected


def http_overhead(proof: Proof, folder: Path) -> None:
    """16 streams through HTTP and in process, in turns on the same machine."""
    rounds, num_tokens = proof.sized(quick=2, full=7), proof.sized(quick=32, full=128)
    settings = quire.ModelSettings(memory_bytes=2 << 30, max_sequence_tokens=1024)
    with started(folder, *_serve_words(), module="quire serve") as server:
        ratios = asyncio.run(_overhead_rounds(server, settings, rounds, num_tokens))
    ratio = statistics.median(ratios)
    proof.report("http_overhead", ratio, "at least 0.90", holds=ratio >= 0.90)


async def _overhead_rounds(server: Server, settings: quire.ModelSettings, rounds: int, num_tokens: int) -> list[float]:
    prompts = [f"The story number {at} of the {word} begins" for at, word in enumerate((WORDS * 2)[:16])]
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    ratios = []
    async with (
        aiohttp.ClientSession() as session,
        AsyncEngine(open_model(str(smollm2_directory()), settings)) as engine,
    ):

        async def inside(prompt: str) -> None:
            async for _ in engine.stream(prompt, params):
                pass

        async def outside(prompt: str) -> None:
            body = {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
            await stream_text(session, server.url, body)

        for at in range(rounds + 1):
            seconds = []
            for ask in (inside, outside):
                begun = time.perf_counter()
                await asyncio.gather(*(ask(prompt) for prompt in prompts))
                seconds.append(time.perf_counter() - begun)
            if at:  # the first round warms both
                ratios.append(seconds[0] / seconds[1])
    return ratios


def listening(proof: Proof, folder: Path) -> None:
    """Where it listens: nowhere but on loopback unless asked, and then on one address."""
    with started(folder) as server:
        at_home = [one for one in listeners(server.pid) if not one.startswith("0100007F:")]
    keys = folder / "listeners.json"
    add_key(keys, "somebody")
    # In a network of its own, so that nobody is let in while it is looked at.
    alone = ("unshare", "--map-root-user", "--net") if shutil.which("unshare") else ()
    with started(folder, "--host", "0.0.0.0", "--keys-file", str(keys), before=alone) as server:  # noqa: S104
        abroad = [one for one in listeners(server.pid) if not one.startswith("0100007F:")]
    proof.report("listeners_default", len(at_home), "0 beyond loopback", holds=not at_home)
    proof.report("listeners", len(abroad), "exactly 1 when asked for", holds=len(abroad) == 1)
    num_outbound = len(OUTBOUND.seen)
    proof.report("outbound_looks", OUTBOUND.num_looks)
    proof.report("outbound", num_outbound, "0 connections to elsewhere", holds=num_outbound == 0)


if __name__ == "__main__":
    sys.exit(run("doors", prove))
