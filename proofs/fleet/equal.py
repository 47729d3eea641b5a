"""Answers of the real model through two members and a gateway beside those of one server: all that clients see."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from benchmarks.record import say
from benchmarks.test_model import smollm2_file
from proofs.engine.worker import until
from proofs.fleet.processes import member_lives, model_command
from proofs.framework.proof import Proof, section
from quire.client.engines.client import EngineClient
from quire.client.engines.served import ServedModel, plan_worker
from quire.client.reply.outputs import Completion
from quire.client.request.params import Grammar, SamplingParams
from quire.config import ModelSettings
from quire.fleet.gateway.client import FleetModel
from quire.fleet.gateway.discovery import FixedMembers
from quire.fleet.protocol.keys import make_keys, read_gateway_keys

MIB = 1 << 20
SETTINGS = ModelSettings(
    memory_bytes=1200 * MIB, max_sequence_tokens=1024, max_running=8, num_threads=1, tool_format="hermes"
)
"""The model's own template knows no tools."""
FLAGS = (
    *("--memory", "1200MiB", "--max-model-len", "1024", "--max-running", "8", "--threads", "1"),
    *("--tool-format", "hermes"),
)
AT_ONCE = 8
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"enum": ["river", "stone"]}}, "required": ["word"]},
    },
}
TOPICS = ("a river", "a stone", "the light of winter", "an old engine", "a window", "seven oranges", "a letter")
REPEATED = "one two three four five six seven eight nine ten. "
"""What is easy to guess: drafts are taken."""

Asked = tuple[str, SamplingParams, bool]
"""A prompt, how it is sampled, and whether a tool has to be called."""


def asked(random: Random, number: int) -> Asked:
    """All kinds in turn, so that even a short run has each of them."""
    topic, seed = random.choice(TOPICS), random.getrandbits(60)
    plain = f"Write about {topic}, number {random.randrange(50)}:"
    length = random.randint(8, 32)
    kinds: Sequence[Asked] = (
        (plain, SamplingParams(max_tokens=length, temperature=0.0), False),
        (plain, SamplingParams(max_tokens=length, temperature=1.1, seed=seed, top_k=40, top_p=0.9), False),
        (plain, SamplingParams(max_tokens=length, temperature=0.9, seed=seed, min_p=0.05, min_tokens=6), False),
        (plain, SamplingParams(max_tokens=length, seed=seed, presence_penalty=0.6, frequency_penalty=0.3), False),
        (plain, SamplingParams(max_tokens=length, seed=seed, repetition_penalty=1.3, ignore_eos=True), False),
        (plain, SamplingParams(max_tokens=length, seed=seed, logprobs=3, prompt_logprobs=1), False),
        (plain, SamplingParams(max_tokens=length, seed=seed, n=3), False),
        (plain, SamplingParams(max_tokens=length, seed=seed, stop=["the", "."], n=2), False),
        (plain, SamplingParams(max_tokens=length, seed=seed, logit_bias={260: 4.0, 30: -100.0}), False),
        (
            plain,
            SamplingParams(max_tokens=48, seed=seed, grammar=Grammar.regex(r"[A-Z][a-z]{3,9}( [a-z]{2,8}){2,5}")),
            False,
        ),
        (topic, SamplingParams(max_tokens=64, seed=seed, temperature=1.0), True),
        (REPEATED * 8, SamplingParams(max_tokens=2 * length, temperature=0.0, ignore_eos=True), False),
    )
    return kinds[number % len(kinds)]


async def answered(model: EngineClient, one: Asked) -> Completion:
    """By whoever it is."""
    prompt, params, calls = one
    if calls:
        messages = [{"role": "user", "content": f"Look up the word for {prompt}."}]
        return await model.chat(messages, params, tools=[LOOK_UP], tool_choice="required")
    return await model.generate(prompt, params)


def seen(done: Completion) -> tuple[object, ...]:
    """All that a client sees but times, and what was cached where."""
    answers = tuple(
        (
            one.text,
            one.token_ids,
            one.finish_reason,
            one.stop_reason,
            one.logprobs,
            tuple((call.name, call.arguments) for call in one.tool_calls),
        )
        for one in done.answers
    )
    return answers, done.prompt_token_ids, done.prompt_logprobs


async def all_seen(model: EngineClient, questions: Sequence[Asked]) -> list[tuple[object, ...]]:
    """So many at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(question: Asked) -> tuple[object, ...]:
        async with room:
            return seen(await answered(model, question))

    return list(await asyncio.gather(*map(one, questions)))


@section("equal")
async def equal(proof: Proof) -> None:
    """Two members with keys and a gateway; then one server as `quire serve` has it."""
    questions = [asked(proof.random, number) for number in range(proof.sized(quick=24, full=500))]
    with TemporaryDirectory() as folder:
        member_keys, gateway_keys = make_keys(Path(folder) / "keys")
        with member_lives(model_command(smollm2_file(), member_keys, *FLAGS), 2) as lives:
            source = FixedMembers([one.address for one in lives])
            async with FleetModel("smollm2", source, read_gateway_keys(gateway_keys)) as model:
                await until(lambda: model.fleet.num_ready == 2)
                through_fleet = await all_seen(model, questions)
                used = [known.num_received for known in model.fleet.members.values()]
                num_drafts = model.stats().num_accepted_tokens
    say(f"  {used} requests of the two members, {num_drafts} drafts taken")
    async with ServedModel(plan_worker(str(smollm2_file()), SETTINGS)) as alone:
        by_one = await all_seen(alone, questions)
    num_unequal = sum(one != other for one, other in zip(through_fleet, by_one, strict=True))
    proof.equals("unequal", num_unequal, 0, f"of {len(questions)} requests")
    proof.at_least("equal_least_used", min(used), len(questions) // 5, "requests of the member that had fewer")
    proof.at_least("equal_drafts", num_drafts, 1, "guessed tokens that were right, through the fleet")
