"""`make proof-engine`: text that streams right, chats that find their cache, nothing left behind, a first five minutes.

Where text matters the real model talks; where only counts matter, the oracle.
"""

import asyncio
import os
import re
import statistics
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import quire
from benchmarks.record import ROOT, say
from benchmarks.test_model import smollm2, smollm2_directory
from proofs.api.load import WORDS
from proofs.framework.proof import Proof, run, section
from proofs.numerics.torch_backend import is_near_border
from quire.client.engines.async_engine import AsyncEngine
from quire.client.engines.llm import LLM
from quire.client.engines.opening import OpenedModel, open_model
from quire.client.request.params import SamplingParams
from quire.text.tokenizer import Tokenizer
from tests.support.models import small_tokenizers
from tests.support.models.models import Ask
from tests.support.models.texts import check_texts
from tests.support.servers.talkers import talker

QUESTIONS = ("Tell me about the {}.", "Write a sentence with the words {} and {}.", "What is a {}?", "Count to {n}.")


@cache
def opened_model() -> OpenedModel:
    """The test model, which several sections ask."""
    return open_model(str(smollm2_directory()), quire.ModelSettings(memory_bytes=3 << 30, max_sequence_tokens=2048))


@section("text")
def texts(proof: Proof) -> None:
    count = proof.sized(quick=2_000, full=20_000)
    real = Tokenizer.from_files(smollm2().tokenizer_file or Path(), max_bytes=1 << 20)
    kinds = [real, small_tokenizers.byte_level(), small_tokenizers.sentencepiece(), small_tokenizers.metaspace()]
    each, dice = count // len(kinds), proof.random
    wrong = [line for tokenizer in kinds for line in check_texts(tokenizer, each, dice.getrandbits(32))]
    proof.report("text_cases", each * len(kinds))
    proof.none("text_wrong", wrong)


@section("starting")
def help_ms(proof: Proof) -> None:
    seconds = []
    for _ in range(15):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "quire", "--help"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - started)
    proof.at_most("help_ms", statistics.median(seconds) * 1000, 300, "the median")


@section("cancelling")
def cancel_leaks(proof: Proof) -> None:
    """Consumers leave at random moments: before the first token, between, by breaking off, by being cancelled."""
    random, opened = proof.random, talker(num_blocks=512, max_step_tokens=128)
    count = proof.sized(quick=300, full=2_000)

    num_left_early = 0

    async def visit(engine: AsyncEngine) -> None:
        nonlocal num_left_early
        params = SamplingParams(max_tokens=random.randint(20, 200), n=random.choice([1, 1, 1, 2]))
        prompt = " ".join(random.choices(WORDS, k=random.randint(1, 40)))
        left = random.randint(0, 30)
        stream = engine.stream(prompt, params)
        is_over = False
        try:
            async for piece in stream:
                is_over = piece.finish_reason is not None
                left -= 1
                if left <= 0:
                    break
        finally:
            num_left_early += not is_over
            await stream.aclose()  # type: ignore[attr-defined]

    async def crowd() -> None:
        async with AsyncEngine(opened) as engine:
            while num_left_early < count:
                tasks = [asyncio.create_task(visit(engine)) for _ in range(100)]
                for task in tasks[:: random.randint(2, 5)]:
                    await asyncio.sleep(random.choice([0, 0, 0.001]))
                    task.cancel()
                done = await asyncio.gather(*tasks, return_exceptions=True)
                errors = [one for one in done if one is not None and not isinstance(one, asyncio.CancelledError)]
                if errors:
                    raise errors[0]
            await engine.generate("the last one", SamplingParams(max_tokens=4))

    asyncio.run(crowd())
    held = opened.engine.memory.stats().num_referenced_blocks + len(opened.engine.scheduler.live)
    proof.at_least("cancels", num_left_early, count)
    proof.equals("cancel_leaks", held, 0, "blocks held")


def _question(random: Random) -> str:
    words = random.sample(WORDS, 2)
    return random.choice(QUESTIONS).format(*words, n=random.randint(3, 30))


@section("second turns")
def second_turns(proof: Proof) -> None:
    """What turn 2 finds is what it shares with turn 1, to the block. All first turns run together, then all second."""
    random, opened = proof.random, opened_model()
    llm, size = LLM(opened), opened.engine.memory.config.block_size
    num_right = num_broken = 0
    count = proof.sized(quick=6, full=100)
    talks = [[{"role": "user", "content": _question(random)}] for _ in range(count)]
    params = [SamplingParams(max_tokens=random.randint(8, 60), temperature=0.2, top_p=0.9) for _ in talks]
    firsts = llm.chat(talks, params)
    for talk, first in zip(talks, firsts, strict=True):
        talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": _question(random)}]
    for first, second in zip(firsts, llm.chat(talks, SamplingParams(max_tokens=2)), strict=True):
        known = (*first.prompt_token_ids, *first.token_ids[:-1])
        pairs = zip(known, second.prompt_token_ids, strict=False)
        shared = next((at for at, (one, other) in enumerate(pairs) if one != other), len(known))
        expected = min(shared, len(second.prompt_token_ids) - 1) // size * size
        num_right += second.num_cached_tokens == expected
        num_broken += shared < len(known)
    proof.equals("turn2_cached", num_right, count)
    proof.at_most("turn2_broken", num_broken, count / 20, "5 of 100")


@section("many at once")
def concurrent(proof: Proof) -> None:
    """64 at once give what each gives alone."""
    random, opened, asks = proof.random, opened_model(), []
    for seed in range(64 if proof.is_full else 12):
        params = SamplingParams(
            max_tokens=random.randint(4, 40),
            seed=seed,
            temperature=random.choice([0.0, 0.0, 0.7, 1.0]),
            top_p=random.choice([1.0, 0.9]),
            repetition_penalty=random.choice([1.0, 1.1]),
            stop=random.choice([(), (".",), ("\n",)]),
            n=random.choice([1, 1, 1, 2]),
        )
        asks.append((_question(random) * random.randint(1, 8), params))
    alone = [LLM(opened).generate(prompt, params)[0] for prompt, params in asks]
    opened.engine.memory.clear()

    async def ask() -> list[quire.Completion]:
        async with AsyncEngine(opened) as engine:
            return list(await asyncio.gather(*(engine.generate(prompt, params) for prompt, params in asks)))

    together = asyncio.run(ask())
    unequal = near_ties = 0
    for (_, params), one, other in zip(asks, alone, together, strict=True):
        for answer, again in zip(one.answers, other.answers, strict=True):
            if answer.text != again.text:
                is_near = _is_near(opened, params, one, answer, again)
                near_ties, unequal = near_ties + is_near, unequal + (not is_near)
    proof.report("concurrent_requests", len(asks))
    proof.report("concurrent_near_ties", near_ties, "counted apart")
    proof.equals("concurrent_unequal", unequal, 0)


def _is_near(
    opened: OpenedModel, params: SamplingParams, one: quire.Completion, answer: quire.Answer, again: quire.Answer
) -> bool:
    """Whether rounding alone may have decided the first token that differs."""
    pairs = list(zip(answer.token_ids, again.token_ids, strict=False))
    at = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
    text = opened.text
    room = max(1, text.max_sequence_tokens - len(one.prompt_token_ids))
    settled = params.resolve(text.defaults, text.eos_token_ids, text.vocabulary_size, room)
    return is_near_border(Ask(one.prompt_token_ids, settled, one.seed), answer.token_ids, at)


@section("the first minutes")
def first_minutes(proof: Proof) -> None:
    """The README's quick start, line by line, with the built wheel in a venv that has nothing."""
    readme = (ROOT / "README.md").read_text()
    lines = re.findall(r"^\$ (.+)$", readme.partition("## Try it")[2].partition("## ")[0], flags=re.MULTILINE)
    commands = [line.partition("  #")[0].strip() for line in lines]
    with TemporaryDirectory() as folder:
        work = Path(folder)
        _run(work, [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(work), str(ROOT)])
        (wheel,) = work.glob("quire-*.whl")
        _run(work, [sys.executable, "-m", "venv", "venv"])
        works = True
        for command in commands:
            given = re.sub(r"^pip install \.$", f"pip install {wheel}", command)
            done = _run(work, ["bash", "-c", given], said="Which city is the capital of France?\n/stats\n/exit\n")
            works &= _is_good(command, done)
            say(f"  {'ok ' if works else 'NOT'} {command}")
    works &= any(command.startswith("quire chat") for command in commands)
    proof.report("first_minutes_commands", len(commands))
    proof.holds("first_minutes", works, "the quick start works when pasted")


def _is_good(command: str, done: "subprocess.CompletedProcess[str]") -> bool:
    if done.returncode != 0:
        say(done.stderr[-600:])
        return False
    if command.startswith("quire generate"):
        return "Paris" in done.stdout
    if command.startswith("quire chat"):
        answer = done.stdout.replace(">", "").strip()
        return "prompt tokens cached" in done.stderr and "1 responses" in done.stderr and len(answer) > 10
    return True


def _run(work: Path, command: list[str], said: str = "") -> "subprocess.CompletedProcess[str]":
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": f"{work}/venv/bin:{environment['PATH']}", "QUIRE_CACHE": str(work / "cache")}
    return subprocess.run(command, cwd=work, env=environment, input=said, capture_output=True, text=True, timeout=900)


PATHS = ("src/quire/client", "src/quire/engine", "src/quire/text")

if __name__ == "__main__":
    sys.exit(run("engine", paths=PATHS))
