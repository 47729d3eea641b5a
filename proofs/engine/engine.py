"""`make proof-engine`: streamed text, prefix hits of chats, cancelled requests, and the quick start of the README.

Sections that check text use the test model; sections that only count use the oracle, a model that computes nothing.
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
    """The test model, opened once for several sections."""
    return open_model(str(smollm2_directory()), quire.ModelSettings(memory_bytes=3 << 30, max_sequence_tokens=2048))


@section("text")
def texts(proof: Proof) -> None:
    count = proof.sized(quick=2_000, full=20_000)
    real = Tokenizer.from_files(smollm2().tokenizer_file or Path(), max_bytes=1 << 20)
    kinds = [real, small_tokenizers.byte_level(), small_tokenizers.sentencepiece(), small_tokenizers.metaspace()]
    num_each, random = count // len(kinds), proof.random
    failures = [line for tokenizer in kinds for line in check_texts(tokenizer, num_each, random.getrandbits(32))]
    proof.report("text_cases", num_each * len(kinds))
    proof.none("text_wrong", failures)


@section("starting")
def help_ms(proof: Proof) -> None:
    seconds = []
    for _ in range(15):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "quire", "--help"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    proof.at_most("help_ms", statistics.median(seconds) * 1000, 300, "the median")


@section("cancelling")
def cancel_leaks(proof: Proof) -> None:
    """Clients stop at random times, before the first token or later, by closing the stream or by being cancelled."""
    random, model = proof.random, talker(num_blocks=512, max_step_tokens=128)
    count = proof.sized(quick=300, full=2_000)

    num_cancelled = 0

    async def run_client(engine: AsyncEngine) -> None:
        nonlocal num_cancelled
        params = SamplingParams(max_tokens=random.randint(20, 200), n=random.choice([1, 1, 1, 2]))
        prompt = " ".join(random.choices(WORDS, k=random.randint(1, 40)))
        num_pieces = random.randint(0, 30)
        stream = engine.stream(prompt, params)
        is_finished = False
        try:
            async for piece in stream:
                is_finished = piece.finish_reason is not None
                num_pieces -= 1
                if num_pieces <= 0:
                    break
        finally:
            num_cancelled += not is_finished
            await stream.aclose()  # type: ignore[attr-defined]

    async def run_clients() -> None:
        async with AsyncEngine(model) as engine:
            while num_cancelled < count:
                tasks = [asyncio.create_task(run_client(engine)) for _ in range(100)]
                for task in tasks[:: random.randint(2, 5)]:
                    await asyncio.sleep(random.choice([0, 0, 0.001]))
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                errors = [end for end in results if end is not None and not isinstance(end, asyncio.CancelledError)]
                if errors:
                    raise errors[0]
            await engine.generate("the last one", SamplingParams(max_tokens=4))

    asyncio.run(run_clients())
    num_held = model.engine.memory.stats().num_referenced_blocks + len(model.engine.scheduler.live)
    proof.at_least("cancels", num_cancelled, count)
    proof.equals("cancel_leaks", num_held, 0, "referenced blocks and live requests")


def _question(random: Random) -> str:
    words = random.sample(WORDS, 2)
    return random.choice(QUESTIONS).format(*words, n=random.randint(3, 30))


@section("second turns")
def second_turns(proof: Proof) -> None:
    """Turn 2 hits exactly the full blocks that it shares with turn 1. All first turns run together, then all second."""
    random, model = proof.random, opened_model()
    llm, size = LLM(model), model.engine.memory.config.block_size
    num_right = num_broken = 0
    count = proof.sized(quick=6, full=100)
    chats = [[{"role": "user", "content": _question(random)}] for _ in range(count)]
    params = [SamplingParams(max_tokens=random.randint(8, 60), temperature=0.2, top_p=0.9) for _ in chats]
    firsts = llm.chat(chats, params)
    for chat, first in zip(chats, firsts, strict=True):
        chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": _question(random)}]
    for first, second in zip(firsts, llm.chat(chats, SamplingParams(max_tokens=2)), strict=True):
        computed = (*first.prompt_token_ids, *first.token_ids[:-1])
        pairs = zip(computed, second.prompt_token_ids, strict=False)
        shared = next((index for index, (a, b) in enumerate(pairs) if a != b), len(computed))
        expected = min(shared, len(second.prompt_token_ids) - 1) // size * size
        num_right += second.num_cached_tokens == expected
        num_broken += shared < len(computed)
    proof.equals("turn2_cached", num_right, count)
    proof.at_most("turn2_broken", num_broken, count / 20, "5 of 100")


@section("many at once")
def concurrent(proof: Proof) -> None:
    """64 concurrent requests give the same answers as each request alone."""
    random, model, requests = proof.random, opened_model(), []
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
        requests.append((_question(random) * random.randint(1, 8), params))
    completions = [LLM(model).generate(prompt, params)[0] for prompt, params in requests]
    model.engine.memory.clear()

    async def generate_all() -> list[quire.Completion]:
        async with AsyncEngine(model) as engine:
            return list(await asyncio.gather(*(engine.generate(prompt, params) for prompt, params in requests)))

    batched_completions = asyncio.run(generate_all())
    num_unequal = num_near_ties = 0
    for (_, params), alone_completion, batched in zip(requests, completions, batched_completions, strict=True):
        for answer, batched_answer in zip(alone_completion.answers, batched.answers, strict=True):
            if answer.text != batched_answer.text:
                is_near = _is_near(model, params, alone_completion, answer, batched_answer)
                num_near_ties, num_unequal = num_near_ties + is_near, num_unequal + (not is_near)
    proof.report("concurrent_requests", len(requests))
    proof.report("concurrent_near_ties", num_near_ties, "counted separately")
    proof.equals("concurrent_unequal", num_unequal, 0)


def _is_near(
    opened: OpenedModel, params: SamplingParams, request: quire.Completion, answer: quire.Answer, other: quire.Answer
) -> bool:
    """Whether rounding alone may have decided the first token that differs between two answers."""
    pairs = list(zip(answer.token_ids, other.token_ids, strict=False))
    index = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
    text = opened.text
    max_tokens = max(1, text.max_sequence_tokens - len(request.prompt_token_ids))
    resolved = params.resolve(text.defaults, text.eos_token_ids, text.vocabulary_size, max_tokens)
    return is_near_border(Ask(request.prompt_token_ids, resolved, request.seed), answer.token_ids, index)


@section("the first minutes")
def first_minutes(proof: Proof) -> None:
    """Run the README's quick start line by line, with the built wheel in an empty virtual environment."""
    readme = (ROOT / "README.md").read_text()
    lines = re.findall(r"^\$ (.+)$", readme.partition("## Try it")[2].partition("## ")[0], flags=re.MULTILINE)
    commands = [line.partition("  #")[0].strip() for line in lines]
    with TemporaryDirectory() as folder:
        work = Path(folder)
        _run(work, [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(work), str(ROOT)])
        (wheel,) = work.glob("quire-*.whl")
        _run(work, [sys.executable, "-m", "venv", "venv"])
        is_working = True
        for command in commands:
            pasted = re.sub(r"^pip install \.$", f"pip install {wheel}", command)
            process = _run(work, ["bash", "-c", pasted], stdin="Which city is the capital of France?\n/stats\n/exit\n")
            is_working &= _is_good(command, process)
            say(f"  {'ok ' if is_working else 'NOT'} {command}")
    is_working &= any(command.startswith("quire chat") for command in commands)
    proof.report("first_minutes_commands", len(commands))
    proof.holds("first_minutes", is_working, "every command of the quick start works")


def _is_good(command: str, process: "subprocess.CompletedProcess[str]") -> bool:
    if process.returncode != 0:
        say(process.stderr[-600:])
        return False
    if command.startswith("quire generate"):
        return "Paris" in process.stdout
    if command.startswith("quire chat"):
        answer = process.stdout.replace(">", "").strip()
        return "prompt tokens cached" in process.stderr and "1 responses" in process.stderr and len(answer) > 10
    return True


def _run(work: Path, command: list[str], stdin: str = "") -> "subprocess.CompletedProcess[str]":
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": f"{work}/venv/bin:{environment['PATH']}", "QUIRE_CACHE": str(work / "cache")}
    return subprocess.run(command, cwd=work, env=environment, input=stdin, capture_output=True, text=True, timeout=900)


PATHS = ("src/quire/client", "src/quire/engine", "src/quire/text")

if __name__ == "__main__":
    sys.exit(run("engine", paths=PATHS))
