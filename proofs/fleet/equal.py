"""Answers of SmolLM2 through a gateway with two members must equal those of one server in all that clients receive."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from benchmarks.record import say
from benchmarks.test_model import smollm2_file
from proofs.engine.worker import until
from proofs.fleet.processes import member_processes, model_command
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
"""`tool_format` is set because the model's own template has no tools."""
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
"""A predictable text, so that speculative tokens are accepted."""

Case = tuple[str, SamplingParams, bool]
"""A prompt, how it is sampled, and whether a tool has to be called."""


def random_case(random: Random, number: int) -> Case:
    """Return a request; kinds alternate by number, so that even a short run has all of them."""
    topic, seed = random.choice(TOPICS), random.getrandbits(60)
    plain = f"Write about {topic}, number {random.randrange(50)}:"
    length = random.randint(8, 32)
    kinds: Sequence[Case] = (
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


async def run_case(model: EngineClient, case: Case) -> Completion:
    """Run the request on this model."""
    prompt, params, must_call = case
    if must_call:
        messages = [{"role": "user", "content": f"Look up the word for {prompt}."}]
        return await model.chat(messages, params, tools=[LOOK_UP], tool_choice="required")
    return await model.generate(prompt, params)


def received(completion: Completion) -> tuple[object, ...]:
    """Return all that a client receives, without times and cached tokens."""
    answers = tuple(
        (
            answer.text,
            answer.token_ids,
            answer.finish_reason,
            answer.stop_reason,
            answer.logprobs,
            tuple((call.name, call.arguments) for call in answer.tool_calls),
        )
        for answer in completion.answers
    )
    return answers, completion.prompt_token_ids, completion.prompt_logprobs


async def run_cases(model: EngineClient, questions: Sequence[Case]) -> list[tuple[object, ...]]:
    """Run all requests, at most `AT_ONCE` at a time."""
    semaphore = asyncio.Semaphore(AT_ONCE)

    async def run_one(question: Case) -> tuple[object, ...]:
        async with semaphore:
            return received(await run_case(model, question))

    return list(await asyncio.gather(*map(run_one, questions)))


@section("equal")
async def equal(proof: Proof) -> None:
    """Compare two members with keys behind a gateway with one server."""
    questions = [random_case(proof.random, number) for number in range(proof.sized(quick=24, full=500))]
    with TemporaryDirectory() as folder:
        member_keys, gateway_keys = make_keys(Path(folder) / "keys")
        with member_processes(model_command(smollm2_file(), member_keys, *FLAGS), 2) as members:
            source = FixedMembers([one.address for one in members])
            async with FleetModel("smollm2", source, read_gateway_keys(gateway_keys)) as model:
                await until(lambda: model.fleet.num_ready == 2)
                through_fleet = await run_cases(model, questions)
                num_requests = [known.num_received for known in model.fleet.members.values()]
                num_drafts = model.stats().num_accepted_tokens
    say(f"  {num_requests} requests of the two members, {num_drafts} accepted draft tokens")
    async with ServedModel(plan_worker(str(smollm2_file()), SETTINGS)) as server:
        through_server = await run_cases(server, questions)
    num_unequal = sum(a != b for a, b in zip(through_fleet, through_server, strict=True))
    proof.equals("unequal", num_unequal, 0, f"of {len(questions)} requests")
    proof.at_least("equal_least_used", min(num_requests), len(questions) // 5, "requests of the member with fewer")
    proof.at_least("equal_drafts", num_drafts, 1, "accepted draft tokens, through the fleet")
